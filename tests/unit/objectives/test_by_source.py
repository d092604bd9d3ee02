"""The share of each source in the loss of a micro-batch; in padded ones: runs/test_mixtures.py."""

import pytest
import torch
from torch import Tensor

from trainer.core.micro_batch import Fields
from trainer.data.collate import pack_samples
from trainer.objectives import next_token
from trainer.objectives.base import sums_of, weights_of
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken

TOKENS = 11
LENGTHS = (4, 2, 5, 3)
OF = ("code", "web", "code", "web")


class Table:
    """Gives logits that depend on the token alone, or what goes into the output layer."""

    compiled_by = None

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(TOKENS, 6, dtype=torch.float64, requires_grad=True)
        self.output_layer = torch.nn.Linear(6, TOKENS).double()
        self.calls = 0

    def __call__(self, fields: Fields) -> Tensor:
        return self.output_layer(self.without_output_layer(fields))

    def without_output_layer(self, fields: Fields) -> Tensor:
        self.calls += 1
        return self.hidden[fields["input_ids"]]


def packed(*sources: str, marked: bool = True) -> Fields:
    """Samples of some sources in one row."""
    found = []
    for number, (length, source) in enumerate(zip(LENGTHS, OF, strict=True)):
        ids = (torch.arange(length) * 3 + number) % TOKENS
        marks = {f"source:{n}": torch.full((length,), n == source) for n in ("code", "web", "none")}
        if source in sources:
            found.append({"input_ids": ids, "labels": ids, **(marks if marked else {})})
    return pack_samples(found, found[0].keys(), sum(LENGTHS) + 3, str)


def test_a_share_is_the_loss_of_the_source_s_samples_alone(monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", 0)  # so that logits are made in chunks
    objective, model, fields = NextToken(), Table(), packed("code", "web")
    weights = weights_of(objective, fields)
    sums = sums_of(objective, model, fields, weights)
    assert model.calls == 1, "the model runs once"
    for source in ("code", "web"):
        alone = packed(source, marked=False)
        expected = objective.sums(Table(), alone).losses["cross_entropy"]
        assert weights[f"loss_{source}"] == objective.weights(alone)["cross_entropy"]
        found = float(sums.metrics[f"loss_{source}"])
        assert found == pytest.approx(float(expected.detach()), rel=1e-12)
    assert (float(sums.metrics["loss_none"]), weights["loss_none"]) == (0.0, 0.0)
    assert not sums.metrics["loss_code"].requires_grad
    plain = packed("code", "web", marked=False)
    expected = sums_of(objective, Table(), plain, weights_of(objective, plain))
    assert sums.losses["cross_entropy"].equal(expected.losses["cross_entropy"])
    assert expected.metrics == {}


def test_samples_with_one_label_each_have_shares_too():
    objective, labels = Classify(), torch.tensor([0, 2, 1, 1])
    logits = torch.randn(4, 3, requires_grad=True)
    marks = torch.tensor([True, False, True, False])
    fields = {"labels": labels, "source:a": marks, "source:b": ~marks}
    weights = weights_of(objective, fields)
    sums = sums_of(objective, lambda _: logits, fields, weights)
    for name, rows in (("a", marks), ("b", ~marks)):
        own = {"labels": labels[rows]}
        (expected,) = objective.sums(lambda _, r=rows: logits[r], own).losses.values()
        found = float(sums.metrics[f"loss_{name}"])
        assert found == pytest.approx(float(expected.detach()), rel=1e-6)
        assert weights[f"loss_{name}"] == 2


class Coupled(NextToken):
    """A loss that is more than a sum over labels at their own logits."""

    sums_samples = False


def test_another_loss_has_no_shares_and_sees_no_marks():
    fields = packed("code", "web")
    weights = weights_of(Coupled(), fields)
    assert weights.keys() == {"cross_entropy", "accuracy"}
    assert sums_of(Coupled(), Table(), fields, weights).metrics == {}
