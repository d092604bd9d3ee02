"""Several loss terms, each over a denominator of its own: exact for every cut, by name."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lib.support import EXACT, VOCABULARY, Bench, RaggedText, TinyLM, relative_error
from trainer.core.micro_batch import IGNORED
from trainer.objectives.base import Objective, Sums
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken, shifted_labels
from trainer.plan.cuts import Budget, Fixed
from trainer.training.step import NO_LOSS_TERMS, train_step

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
    reference, expected = Bench(Fixed(steps=1), objective=objective).gradient_and_loss()
    for cut in (Fixed(micro=3), Budget(max_tokens=24)):
        found, loss = Bench(cut, objective=objective).gradient_and_loss()
        assert relative_error(found, reference) <= EXACT[torch.float64]
        assert loss == pytest.approx(expected, rel=EXACT[torch.float64])


def test_a_mean_of_means_divides_each_micro_batch_by_its_own_weight():
    bench = Bench(Fixed(micro=4), normalizer="micro_batches")
    batch, means = bench.feed.next(), []
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            sums = bench.objective.sums(bench.context.parallel.call, micro_batch.fields)
            means.append(sums.losses["cross_entropy"] / micro_batch.weights["cross_entropy"])
    report = train_step(bench.context, batch, bench.feed)
    assert float(report.loss) == pytest.approx(float(sum(means)) / 4, rel=EXACT[torch.float64])


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
