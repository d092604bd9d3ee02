"""Evaluation: named sums over named weights, the same for every cap, leaving no trace."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from tests.lib.support import VOCABULARY, Bench, RaggedText, TinyLM
from trainer.core.errors import DoesNotFitError
from trainer.core.micro_batch import IGNORED
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.models.gpt import GPT
from trainer.objectives import next_token
from trainer.objectives.linear_cross_entropy import CHUNK_BYTES
from trainer.objectives.next_token import NextToken, shifted_labels
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget
from trainer.plan.lengths import Lengths
from trainer.training.data import HeldOut
from trainer.training.evaluation import _attempt, _rounded_once, evaluate_parts

CAPS = [1, 24, 61, 10**9]
OBJECTIVE = NextToken(z_loss=1e-2)


def held_out(
    max_tokens: int, dataset: RaggedText | None = None, *, most: int | None = None, workers: int = 0
) -> HeldOut:
    data = dataset or RaggedText(num_samples=33, seed=7)
    loader, lengths = Loader(data, num_workers=workers, seed=0), Lengths.of(data.lengths)
    caps = {"max_tokens": max_tokens, "most": most}
    return HeldOut(loader=loader, lengths=lengths, layout=Layout(), **caps)


def evaluated(bench: Bench, samples: HeldOut) -> dict[str, float]:
    return evaluate_parts(bench.context, {"": samples})[""]


def by_hand(module: nn.Module, data: RaggedText) -> dict[str, float]:
    """Sample by sample, without padding, in eval mode."""
    module.eval()
    entropy = z_loss = hits = terms = 0.0
    with torch.no_grad():
        for index in range(len(data)):
            fields = {name: value[None] for name, value in data[index].items()}
            targets = shifted_labels(fields)[0]
            logits = module(fields["input_ids"])[0]
            valid = targets != IGNORED
            entropy += float(F.cross_entropy(logits, targets, reduction="sum"))
            z_loss += 1e-2 * float(logits.logsumexp(-1)[valid].square().sum())
            hits += float((logits.argmax(-1) == targets).sum())
            terms += float(valid.sum())
    module.train()
    return {
        "loss": (entropy + z_loss) / terms,
        "cross_entropy": entropy / terms,
        "z_loss": z_loss / terms,
        "accuracy": hits / terms,
    }


def test_evaluation_is_exact_for_every_cap():
    def model() -> nn.Module:
        return TinyLM(dropout=0.3, norm=nn.BatchNorm1d(8))

    bench = Bench(Budget(max_tokens=60), model=model, objective=OBJECTIVE)
    bench.step()  # so that running statistics are not their defaults
    expected = by_hand(bench.module, RaggedText(num_samples=33, seed=7))
    for cap in CAPS:
        found = evaluated(bench, held_out(cap))
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=1e-12)


def test_metrics_are_the_same_for_every_cap_and_for_a_loss_in_chunks(monkeypatch):
    """What they are: tests/unit/objectives/test_evaluation_metrics.py."""
    bench = Bench(
        Budget(max_tokens=60),
        model=lambda: GPT(VOCABULARY, width=8, num_layers=1, num_heads=2, max_length=40),
        objective=NextToken().with_metrics(["perplexity", "f1", "top_3"]),
    )
    expected = evaluated(bench, held_out(CAPS[-1]))
    assert expected.keys() == {"loss", "accuracy", "perplexity", "f1", "top_3"}
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 5 * VOCABULARY)  # five positions
    for least in (next_token.LEAST_BYTES, 0):
        monkeypatch.setattr(next_token, "LEAST_BYTES", least)
        for cap in CAPS:
            assert evaluated(bench, held_out(cap)) == pytest.approx(expected, rel=1e-12)


def ids_of(count: int, most: int | None) -> list[int]:
    samples = replace(held_out(1), lengths=Lengths(np.broadcast_to(1, count)), most=most)
    return sorted(i for request in samples.requests(0) for i in request.ids)


def test_at_most_so_many_samples_spread_evenly_are_evaluated():
    assert ids_of(10, None) == [*range(10)]
    assert ids_of(10, 4) == [0, 2, 5, 7]
    assert ids_of(3, 10) == [0, 1, 2]
    assert ids_of(10**9, 3) == [0, 333333333, 666666666]
    bench, data = Bench(Budget(max_tokens=60), objective=OBJECTIVE), RaggedText(33, seed=7)
    chosen = ids_of(33, 7)
    expected = by_hand(bench.module, Subset(data, chosen))  # type: ignore[arg-type]
    assert evaluated(bench, held_out(24, most=7)) == pytest.approx(expected, rel=1e-12)
    random = RaggedText(33, seed=7)
    random.draws_randomness = True  # so that no thread may load it
    for workers in (0, 1):
        samples = held_out(24, random, most=7, workers=workers)
        assert evaluated(bench, samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shapes=(8, 1000)),
        Layout(pad_multiple=8, longest=1000, group_size=4),
        Layout(pad_multiple=8, longest=1000, packed=True, group_size=4),
    ],
    ids=["shapes", "groups", "packed groups"],
)
def test_a_cap_below_what_the_longest_sample_is_padded_to_leaves_it_alone(layout):
    samples = replace(held_out(480), lengths=Lengths.of(np.array([*[7] * 9, 993])), layout=layout)
    assert sorted(i for each in samples.requests(0) for i in each.ids) == [*range(10)]


@pytest.mark.parametrize("num_ranks", [3, 40])
def test_ordered_sums_have_the_same_bits_for_every_number_of_ranks(num_ranks):
    bench = Bench(Budget(max_tokens=60), objective=OBJECTIVE)
    expected = evaluated(bench, replace(held_out(60), is_ordered=True))
    samples = replace(held_out(60), is_ordered=True, layout=Layout(world_size=num_ranks))
    visited = [i for rank in range(num_ranks) for each in samples.requests(rank) for i in each.ids]
    assert sorted(visited) == list(range(33))
    ranks = [World(rank=rank, size=num_ranks) for rank in range(num_ranks)]
    found = [_attempt(replace(bench.context, world=world), samples, bool) for world in ranks]
    sums, weights = (
        {
            name: _rounded_once([n for each in found for n in each[k].get(name, [])])
            for name in ("cross_entropy", "accuracy")
        }
        for k in ("sums", "weights")
    )
    for name, total in sums.items():
        assert total / weights[name] == expected[name]


def test_modes_generators_buffers_and_gradients_are_left_as_found():
    bench = Bench(Budget(max_tokens=60), model=lambda: TinyLM(dropout=0.5, norm=nn.BatchNorm1d(8)))
    module = bench.module
    module.norm.eval()  # frozen by its owner: evaluation must not thaw it
    module.head.bias.grad = torch.ones_like(module.head.bias)

    def found() -> list[Any]:
        modes = [part.training for part in module.modules()]
        tensors = [*module.state_dict().values(), module.head.bias.grad, torch.get_rng_state()]
        draws = [random.getstate(), np.random.get_state()[1].tolist()]
        return [modes, [tensor.tolist() for tensor in tensors], draws]

    before = found()
    evaluated(bench, held_out(60))
    assert found() == before


class Memory(nn.Module):
    """A model with room for so many positions in evaluation, and one such failure each time."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.body = TinyLM()
        self.positions, self.failures = positions, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        if not self.training and input_ids.numel() > self.positions:
            self.failures += 1
            raise torch.OutOfMemoryError("injected")
        return self.body(input_ids)


def test_running_out_of_memory_shrinks_the_evaluation_and_not_the_training_cut():
    bench = Bench(Budget(max_tokens=60), model=lambda: Memory(50), objective=OBJECTIVE)
    cut = bench.feed.cut
    samples = held_out(400)
    found = evaluated(bench, samples)
    assert bench.module.failures == 3  # 400, 200 and 100 fail; 50 fits
    assert samples.max_tokens == 400
    assert bench.feed.cut == cut
    expected = by_hand(bench.module.body, RaggedText(num_samples=33, seed=7))
    assert found == pytest.approx(expected, rel=1e-12)
    bench.module.positions = 3
    with pytest.raises(DoesNotFitError, match=r"one sample of \d+ tokens: lower data.max_length"):
        evaluated(bench, samples)
    assert all(part.training for part in bench.module.modules())


def test_held_out_data_without_a_label_give_not_a_number():
    data = RaggedText(num_samples=9)
    data.masked = set(range(9))
    found = evaluated(Bench(Budget(max_tokens=60)), held_out(60, data))
    assert found == pytest.approx({"loss": float("nan"), "accuracy": float("nan")}, nan_ok=True)
