"""What is said of odd steps, and that nothing is said of runs that learn."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.nightly import nightly
from trainer.features.watch.early import BEGINNING, QUIET_STEPS, EarlyWatch

SEEDS = [0, *map(nightly, range(1, 5))]


def entries(
    seed: int,
    steps: int = 300,
    lr: float = 0.01,
    size: int = 32,
    labelled: Callable[[int, Tensor], Tensor] = lambda _, labels: labels,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    raised_at: int = 0,
) -> Iterator[dict[str, Any]]:
    """A small classifier learns three clouds that overlap; gives what metrics.jsonl has of it."""
    torch.manual_seed(seed)
    centres = torch.randn(3, 8) * 1.5
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = kind(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        labels = torch.randint(3, (size,))
        x = centres[labels] + torch.randn(size, 8)
        value = nn.functional.cross_entropy(model(x), labelled(step, labels))
        optimizer.zero_grad()
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield {"step": step, "loss": value.item(), "grad_norm": float(norm)}
        if step == raised_at:
            optimizer.param_groups[0]["lr"] *= 30


def said(found: Iterator[dict[str, Any]], ids: Sequence[int] = range(32), **how: Any) -> list[str]:
    watch, lines = EarlyWatch(**how), []
    for entry in found:
        if (line := watch.remark(entry, ids, Path())) is not None:
            lines.append(f"step {entry['step']}: {line}")
    return lines


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_said_of_runs_that_learn(seed):
    assert said(entries(seed)) == []
    assert said(entries(seed, lr=0.1, kind=torch.optim.SGD)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_whose_labels_are_shuffled_is_named_with_its_samples_once(seed):
    def shuffled(step: int, labels: Tensor) -> Tensor:
        return (labels + 1) % 3 if step in {150, 155} else labels

    (line,) = said(entries(seed, labelled=shuffled), ids=range(40, 72))
    assert line.startswith("step 150: loss ")
    assert line.endswith("samples 40, 41, 42, ... of 32 (log.samples=true lists all)")
    assert "learning rate too high" in line
    (line,) = said(entries(seed, labelled=shuffled), ids=[7, 8], keeps_samples=True)
    assert line.endswith("samples 7, 8 (all in samples.jsonl)")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_learning_rate_that_is_thirty_times_as_high_is_seen_and_not_spoken_of_each_step(seed):
    lines = said(entries(seed, lr=0.1, steps=200, raised_at=120))
    assert 1 <= len(lines) <= 1 + 80 // QUIET_STEPS
    assert 120 < int(lines[0].split(":")[0].removeprefix("step ")) < 150


@pytest.mark.parametrize("seed", SEEDS)
def test_a_learning_rate_of_next_to_nothing_is_a_plateau_once_behind_the_warm_up(seed):
    (line,) = said(entries(seed, lr=1e-8, size=1024), warmup_steps=20)
    assert line.startswith(f"step {20 + BEGINNING}: the loss, ")
    assert "has not fallen in 120 steps: often a learning rate too small" in line
    assert said(e for e in entries(seed, lr=1e-8) if e["step"] > 40) == []  # it began elsewhere


def test_steps_without_an_update_are_no_matter():
    odd = {"loss": None, "grad_norm": None}, {"loss": float("nan"), "grad_norm": float("inf")}
    found = [
        entry | odd[entry["step"] % 2] if entry["step"] % 10 < 2 else entry for entry in entries(0)
    ]
    assert said(iter(found)) == []
