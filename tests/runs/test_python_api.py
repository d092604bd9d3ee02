"""Faults that reviewers found, each kept from coming back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.lib.support import VOCABULARY, Bench, TinyLM
from trainer.accumulate.base import GradientStrategy
from trainer.checkpoint.store import CheckpointStore
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.plan.cuts import Fixed
from trainer.plan.memory import Shape
from trainer.training.step import train_step
from trainer.tune.predict import Predictor
from trainer.tune.workload import Tiled, Workload


class LooksAtValues(TinyLM):
    """Asks for a value when it is given more than one sample."""

    def forward(self, input_ids: Tensor) -> Tensor:
        if len(input_ids) > 1 and bool((input_ids < 0).any()):
            raise ValueError("negative token")
        return super().forward(input_ids)


def test_a_shape_that_cannot_run_fake_is_probed_even_if_smaller_ones_can():
    bench = Bench(Fixed(micro=4), torch.float32, model=LooksAtValues)
    ids = torch.randint(0, VOCABULARY, (1, 8))
    work = Workload(
        model=bench.module,
        objective=bench.kit.objective,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        make_fields=Tiled({"input_ids": ids, "labels": ids}, 8),
    )
    predict = Predictor(work, Shape(1, 8))
    assert predict(Shape(4, 8)).peak_bytes > predict(Shape(1, 8)).peak_bytes


class OutOfMemory(GradientStrategy):
    def backward(self, model, objective, micro_batches, divisors, sync):
        raise torch.OutOfMemoryError("injected")


def test_a_mean_of_means_is_never_replayed_in_other_pieces():
    bench = Bench(Fixed(micro=4), normalizer="micro_batches", strategy=OutOfMemory())
    with pytest.raises(DoesNotFitError, match="a mean of means changes with the cut"):
        train_step(bench.kit, bench.feed.next(), bench.feed)


class Masked(nn.Module):
    """Keeps a causal mask, as many models do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(258, width)
        self.head = nn.Linear(width, 258)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def test_a_model_with_a_mask_of_minus_infinity_is_saved(tmp_path, monkeypatch):
    from trainer import train  # noqa: PLC0415 - as a user writes it

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {i} of a text" for i in range(40)))
    settings = ["data=text", "data.path=text.txt", "batch.global=8", "steps=2"]
    settings += ["accum=fixed", "accum.micro=4", "wandb.mode=disabled"]
    run = train([*settings, "model._target_=tests.runs.test_python_api.Masked"])
    assert run.exit_code == 0
    assert CheckpointStore(run.folder / "checkpoints").load().step == 2


def test_a_cap_below_the_longest_sample_is_refused_before_the_first_step(tmp_path, monkeypatch):
    from trainer import train  # noqa: PLC0415 - as a user writes it

    monkeypatch.chdir(tmp_path)
    texts = [f"short {i}" for i in range(60)] + ["long " * 20]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    settings = ["data=text", "data.path=text.txt", "data.holdout=0.0", "batch.global=2"]
    with pytest.raises(ConfigError, match="less than the longest sample, of 10"):
        train([*settings, "accum=budget", "accum.max_tokens=30", "wandb.mode=disabled"])
