"""Several loss terms, each over a denominator of its own: exact for every cut, by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM, relative_error
from trainer.accumulate.normalizer import divisors
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World
from trainer.objectives.base import IGNORED, Objective, Sums
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken, shifted_labels
from trainer.plan.cut import Cut
from trainer.plan.cuts import Budget, Fixed
from trainer.training.step import NO_LOSS_TERMS, train_step

CUTS: dict[str, Cut] = {
    "one sample each": Fixed(micro=1),
    "micro 3": Fixed(micro=3),
    "budget 24": Budget(max_tokens=24),
    "budget 60": Budget(max_tokens=60),
}
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
    """Cross entropy over tokens, z-loss over tokens, and an auxiliary loss over samples."""

    def weights(self, fields):
        terms = float((shifted_labels(fields) != IGNORED).sum())
        rows = float(fields["input_ids"].shape[0])
        return {"cross_entropy": terms, "z_loss": terms, "length": rows}

    def sums(self, model, fields):
        logits = model({"input_ids": fields["input_ids"]})
        targets = shifted_labels(fields)
        flat, wanted = logits.flatten(0, 1), targets.flatten()
        partition = flat.logsumexp(-1).masked_fill(wanted == IGNORED, 0.0)
        mask = fields["attention_mask"]
        pooled = (logits * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Sums(
            losses={
                "cross_entropy": F.cross_entropy(flat, wanted, reduction="sum"),
                "z_loss": 1e-2 * partition.square().sum(),
                "length": 0.1 * pooled.square().sum(),
            }
        )


OBJECTIVES: dict[str, Objective] = {
    "class weights": Tags(Classify(class_weights=CLASS_WEIGHTS)),
    "label smoothing": NextToken(label_smoothing=0.1),
    "class weights, smoothed": Tags(Classify(class_weights=CLASS_WEIGHTS, label_smoothing=0.1)),
    "z-loss": NextToken(z_loss=1e-2),
    "z-loss, smoothed": NextToken(z_loss=1e-2, label_smoothing=0.1),
    "an auxiliary term over samples": Balanced(),
}


def gradient_and_loss(bench: Bench) -> tuple[dict[str, Tensor], float]:
    stored: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        stored.update({n: p.grad.clone() for n, p in bench.module.named_parameters()})

    handle = bench.kit.optimizer.register_step_pre_hook(keep)
    report = train_step(bench.kit, bench.feed.next(), bench.feed)
    handle.remove()
    return stored, float(report.loss)


def whole_batch(bench: Bench) -> MicroBatch:
    """The whole global batch in one piece, in sample order."""
    [micro_batch] = (
        Bench(Fixed(steps=1), bench.dtype, objective=bench.objective).feed.next().micro_batches
    )
    return micro_batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_term_is_divided_by_its_own_weight_of_the_whole_batch(name, cut, dtype):
    objective = OBJECTIVES[name]
    reference, expected = gradient_and_loss(Bench(Fixed(steps=1), dtype, objective=objective))
    found, loss = gradient_and_loss(Bench(CUTS[cut], dtype, objective=objective))
    assert relative_error(found, reference) <= EXACT[dtype]
    assert loss == pytest.approx(expected, rel=EXACT[dtype])


@pytest.mark.parametrize(
    ("objective", "arguments"),
    [
        (OBJECTIVES["class weights"], {"weight": True}),
        (OBJECTIVES["class weights, smoothed"], {"weight": True, "label_smoothing": 0.1}),
        (Tags(Classify(label_smoothing=0.1)), {"label_smoothing": 0.1}),
    ],
    ids=["weights", "weights and smoothing", "smoothing"],
)
def test_the_step_is_what_pytorch_calls_the_mean(objective, arguments):
    bench = Bench(Budget(max_tokens=24), objective=objective)
    module, whole = bench.module, whole_batch(bench)
    if "weight" in arguments:
        arguments = arguments | {"weight": torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)}
    logits = module(whole.fields["input_ids"]).transpose(1, 2)
    expected = F.cross_entropy(logits, whole.fields["labels"], **arguments)
    wanted = torch.autograd.grad(expected, list(module.parameters()))
    names = [name for name, _ in module.named_parameters()]
    found, loss = gradient_and_loss(bench)
    assert relative_error(found, dict(zip(names, wanted, strict=True))) <= EXACT[torch.float64]
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)


def test_dividing_class_weights_by_their_count_would_be_far_off():
    class Counted(Tags):
        def weights(self, fields):
            count = super().weights(fields)["accuracy"]
            return {"cross_entropy": count, "accuracy": count}

    right, _ = gradient_and_loss(Bench(CUTS["micro 3"], objective=OBJECTIVES["class weights"]))
    inner = Classify(class_weights=CLASS_WEIGHTS)
    wrong, _ = gradient_and_loss(Bench(CUTS["micro 3"], objective=Counted(inner)))
    assert relative_error(wrong, right) > WRONG


class HalfLabelled(RaggedText):
    """Samples without a label still count for the auxiliary term."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = set(range(len(self)))


def test_a_term_without_weight_adds_nothing_and_the_others_still_train():
    found, loss = gradient_and_loss(
        Bench(CUTS["micro 3"], objective=Balanced(), dataset=HalfLabelled())
    )
    assert loss > 0
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    assert float(found["head.weight"].abs().max()) > 0


def test_a_step_without_any_weight_changes_nothing_and_is_named():
    bench = Bench(CUTS["micro 3"], objective=NextToken(z_loss=1e-2), dataset=HalfLabelled())
    before = bench.parameters()
    report = train_step(bench.kit, bench.feed.next(), bench.feed)
    assert report.skipped == NO_LOSS_TERMS
    assert relative_error(bench.parameters(), before) == 0


weights = st.fixed_dictionaries({"a": st.integers(0, 50), "b": st.integers(0, 50)})


def micro_batch(owned: dict[str, int], size: int) -> MicroBatch:
    return MicroBatch(
        fields={},
        ids=tuple(range(size)),
        weights={name: float(weight) for name, weight in owned.items()},
        num_tokens=0,
        num_positions=0,
        rng_key=0,
    )


def test_a_metric_with_weight_makes_no_step_of_losses_without():
    objective = Tags(Classify(class_weights=[0.0] * VOCABULARY))
    bench = Bench(Fixed(micro=4), objective=objective, model=lambda: TinyLM(norm=nn.BatchNorm1d(8)))
    before = {name: value.clone() for name, value in bench.module.state_dict().items()}
    batch = bench.feed.next()
    assert sum(m.weights["accuracy"] for m in batch.micro_batches) > 0
    assert train_step(bench.kit, batch, bench.feed).skipped == NO_LOSS_TERMS
    assert not bench.kit.optimizer.state
    after = bench.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@settings(max_examples=50)
@given(st.lists(st.tuples(weights, st.integers(0, 5)), min_size=1, max_size=6), st.randoms())
def test_divisors_are_those_of_the_whole_batch_however_it_is_cut(owned, shuffle):
    parts = [micro_batch(*each) for each in owned]
    shuffled = shuffle.sample(parts, len(parts))
    whole = micro_batch(
        {name: int(sum(p.weights[name] for p in parts)) for name in ("a", "b")},
        sum(len(p.ids) for p in parts),
    )
    for kind in ("tokens", "samples"):
        total, [expected] = divisors(kind, ("a", "b"), [whole], World())
        found, each = divisors(kind, ("a", "b"), shuffled, World())
        assert found == total
        assert each == [expected] * len(parts)


@given(st.lists(st.tuples(weights, st.integers(1, 5)), min_size=1, max_size=6))
def test_a_mean_of_means_divides_by_each_micro_batchs_own_weight(owned):
    parts = [micro_batch(*each) for each in owned]
    _, each = divisors("micro_batches", ("a", "b"), parts, World())
    for part, divisor in zip(parts, each, strict=True):
        assert divisor == {name: w * len(parts) for name, w in part.weights.items()}
