"""The share of each source in the loss of a micro-batch, whatever the layout and the objective."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trainer.core.micro_batch import Fields
from trainer.data.collate import pack_samples, pad_samples
from trainer.features.heads.numbers import Numbers
from trainer.objectives import next_token
from trainer.objectives.base import Objective, sums_of, weights_of
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken

TOKENS = 11
LENGTHS = (4, 2, 5, 3)
OF = ("code", "web", "code", "web")


class Table:
    """Gives logits that depend on the token alone, or what goes into the output layer."""

    compiled_by = None

    def __init__(self, *, has_layer: bool = False) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(TOKENS, 6, dtype=torch.float64, requires_grad=True)
        self.layer = torch.nn.Linear(6, TOKENS).double()
        self.output_layer = self.layer if has_layer else None
        self.calls = 0

    def __call__(self, fields: Fields) -> Tensor:
        return self.layer(self.without_output_layer(fields))

    def without_output_layer(self, fields: Fields) -> Tensor:
        self.calls += 1
        return self.hidden[fields["input_ids"]]


def samples(*, marked: bool = True) -> list[dict[str, Tensor]]:
    found = []
    for number, (length, source) in enumerate(zip(LENGTHS, OF, strict=True)):
        ids = (torch.arange(length) * 3 + number) % TOKENS
        marks = {f"source:{n}": torch.full((length,), n == source) for n in ("code", "web", "none")}
        found.append({"input_ids": ids, "labels": ids, **(marks if marked else {})})
    return found


def joined(given: list[dict[str, Tensor]], *, packed: bool) -> Fields:
    join, length = (pack_samples, sum(LENGTHS) + 3) if packed else (pad_samples, max(LENGTHS) + 1)
    return join(given, given[0].keys(), length, str)


def share(objective: Objective, source: str, *, packed: bool) -> float:
    """The mean over the samples of a source alone."""
    alone = [s for s, each in zip(samples(marked=False), OF, strict=True) if each == source]
    fields = joined(alone, packed=packed)
    sums, weights = sums_of(objective, Table(), fields, None), weights_of(objective, fields)
    return float(sums.losses["cross_entropy"].detach()) / weights["cross_entropy"]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "in chunks"])
def test_a_share_is_the_loss_of_the_source_s_samples_alone(packed, in_chunks, monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", 0 if in_chunks else 2**40)
    objective, model = NextToken(), Table(has_layer=in_chunks)
    fields = joined(samples(), packed=packed)
    weights = weights_of(objective, fields)
    sums = sums_of(objective, model, fields, weights)
    assert model.calls == 1, "the model runs once"
    for source in ("code", "web"):
        found = float(sums.metrics[f"loss_{source}"]) / weights[f"loss_{source}"]
        assert found == pytest.approx(share(objective, source, packed=packed), rel=1e-12)
    assert (float(sums.metrics["loss_none"]), weights["loss_none"]) == (0.0, 0.0)
    assert not sums.metrics["loss_code"].requires_grad
    plain = joined(samples(marked=False), packed=packed)
    expected = sums_of(objective, Table(has_layer=in_chunks), plain, weights_of(objective, plain))
    assert sums.losses["cross_entropy"].equal(expected.losses["cross_entropy"])
    assert expected.metrics == {}


@pytest.mark.parametrize("objective", [Classify(), Numbers()], ids=["classes", "numbers"])
def test_samples_with_one_label_each_have_shares_too(objective):
    logits = torch.randn(4, 3 if isinstance(objective, Classify) else 1, requires_grad=True)
    labels = torch.tensor([0, 2, 1, 1])
    labels = labels if isinstance(objective, Classify) else labels.float()
    marks = torch.tensor([True, False, True, False])
    fields = {"labels": labels, "source:a": marks, "source:b": ~marks}
    weights = weights_of(objective, fields)
    sums = sums_of(objective, lambda _: SimpleNamespace(logits=logits), fields, weights)
    for name, rows in (("a", marks), ("b", ~marks)):
        own = {"labels": labels[rows]}
        expected = sums_of(objective, lambda _, r=rows: logits[r], own, None).losses.values()
        assert float(sums.metrics[f"loss_{name}"]) == pytest.approx(
            float(next(iter(expected)).detach()), rel=1e-6
        )
        assert weights[f"loss_{name}"] == 2


class Coupled(NextToken):
    """A loss that is more than a sum over labels at their own logits."""

    sums_samples = False


def test_another_loss_has_no_shares_and_sees_no_marks():
    fields = joined(samples(), packed=False)
    weights = weights_of(Coupled(), fields)
    assert weights.keys() == {"cross_entropy", "accuracy"}
    assert sums_of(Coupled(), Table(), fields, weights).metrics == {}
