"""Several loss terms, each over a denominator of its own: exact for every cut, by name."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.lib.support import EXACT, VOCABULARY, Bench, RaggedText, TinyLM, relative_error
from trainer.accumulate.base import divisors
from trainer.core.micro_batch import IGNORED, MicroBatch
from trainer.core.world import World
from trainer.objectives.base import Objective, Sums
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken, shifted_labels
from trainer.plan.cuts import Budget, Fixed
from trainer.training.step import NO_LOSS_TERMS

CUTS = [Fixed(micro=1), Fixed(micro=3), Budget(max_tokens=24), Budget(max_tokens=60)]
CLASS_WEIGHTS = tuple(0.2 + 0.3 * index for index in range(VOCABULARY))


@dataclass(frozen=True)
class Tags(Objective):
    """Class-weighted, smoothed cross entropy of every position: Classify over ragged rows."""

    metric_names = ("accuracy",)

    inner: Classify

    def weights(self, fields):
        return self.inner.weights(fields)

    def sums(self, model, fields):
        return self.inner.sums(lambda f: model(f).transpose(1, 2), fields)


@dataclass(frozen=True)
class Balanced(Objective):
    """Cross entropy over tokens, and an auxiliary loss over samples."""

    def weights(self, fields):
        terms = float((shifted_labels(fields) != IGNORED).sum())
        return {"cross_entropy": terms, "length": float(fields["input_ids"].shape[0])}

    def sums(self, model, fields):
        logits = model({"input_ids": fields["input_ids"]})
        targets, mask = shifted_labels(fields).flatten(), fields["attention_mask"]
        pooled = (logits * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return Sums(losses={"cross_entropy": entropy, "length": 0.1 * pooled.square().sum()})


OBJECTIVES: dict[str, Objective] = {
    "class weights, smoothed": Tags(Classify(class_weights=CLASS_WEIGHTS, label_smoothing=0.1)),
    "z-loss, smoothed": NextToken(z_loss=1e-2, label_smoothing=0.1),
    "an auxiliary term over samples": Balanced(),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_every_term_is_divided_by_its_own_weight_of_the_whole_batch(objective):
    whole = Bench(Fixed(steps=1), objective=objective)
    reference, expected = whole.gradient_and_loss()
    for cut in CUTS:
        found, loss = Bench(cut, objective=objective).gradient_and_loss()
        assert relative_error(found, reference) <= EXACT[torch.float64]
        assert loss == pytest.approx(expected, rel=EXACT[torch.float64])


class Unlabelled(RaggedText):
    """Samples without a label still count for the auxiliary term."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = set(range(len(self)))


def test_a_term_without_weight_adds_nothing_and_the_others_still_train():
    bench = Bench(Fixed(micro=3), objective=Balanced(), dataset=Unlabelled())
    found, loss = bench.gradient_and_loss()
    assert loss > 0
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    assert float(found["head.weight"].abs().max()) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": NextToken(z_loss=1e-2), "dataset": Unlabelled()},
        {"objective": Tags(Classify(class_weights=[0.0] * VOCABULARY))},
    ],
    ids=["no weight", "a metric's weight only"],
)
def test_a_step_without_any_weight_of_a_loss_changes_nothing_and_is_named(settings):
    bench = Bench(Fixed(micro=4), model=lambda: TinyLM(norm=nn.BatchNorm1d(8)), **settings)
    before = {name: value.clone() for name, value in bench.module.state_dict().items()}
    assert bench.step().skipped == NO_LOSS_TERMS
    assert not bench.context.optimizer.state
    after = bench.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def micro_batch(weights: dict[str, int], size: int) -> MicroBatch:
    numbers = {name: float(weight) for name, weight in weights.items()}
    ids, counts = tuple(range(size)), {"num_tokens": 0, "num_positions": 0}
    return MicroBatch(fields={}, ids=ids, positions=ids, weights=numbers, rng_key=0, **counts)


WEIGHTS = st.fixed_dictionaries({"a": st.integers(0, 50), "b": st.integers(0, 50)})
OWNED = st.lists(st.tuples(WEIGHTS, st.integers(0, 5)), min_size=1, max_size=6)


@given(OWNED, st.randoms())
def test_divisors_are_those_of_the_whole_batch_however_it_is_cut(owned, shuffle):
    parts = [micro_batch(*each) for each in owned]
    shuffled = shuffle.sample(parts, len(parts))
    whole = micro_batch(
        {name: int(sum(p.weights[name] for p in parts)) for name in ("a", "b")},
        sum(len(p.ids) for p in parts),
    )
    for kind in ("tokens", "samples"):
        one = divisors(kind, ("a", "b"), [whole], World())
        found = divisors(kind, ("a", "b"), shuffled, World())
        assert (found.weights, found.whole) == (one.weights, one.whole)
        assert found.each == [one.whole] * len(parts)
    each = divisors("micro_batches", ("a", "b"), parts, World()).each
    for part, divisor in zip(parts, each, strict=True):
        assert divisor == {name: w * len(parts) for name, w in part.weights.items()}
