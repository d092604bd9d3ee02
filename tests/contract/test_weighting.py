"""A loss term of weight w counts w times, in the sum and in the divisor: exact for every cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM, relative_error
from trainer.core.errors import ConfigError, DataError
from trainer.data.loader import Loader, Request
from trainer.features.heads.numbers import Numbers
from trainer.objectives import next_token
from trainer.objectives.classify import Classify
from trainer.objectives.linear_cross_entropy import linear_cross_entropy
from trainer.objectives.next_token import NextToken
from trainer.objectives.weighting import weight_of
from trainer.plan.cuts import Budget, Fixed

ROWS = 40


class Weighted(RaggedText):
    """Samples with a weight each, or one for each token; some of them 0."""

    def __init__(self, kind: str, *, is_known: bool = True) -> None:
        super().__init__(ROWS)
        self.kind, self.is_known = kind, is_known
        draw = torch.Generator().manual_seed(4)
        self.of_tokens = [
            torch.randint(0, 4, (int(n),), generator=draw).double() / 2 for n in self.lengths
        ]

    def __getitem__(self, index):
        weight = self.of_tokens[index]
        if self.kind == "sample":
            weight = weight[0]
        name = "weight" if self.is_known else "other"
        return {**super().__getitem__(index), name: weight}


class Flat:
    """Rows with a class, or two numbers, and a weight."""

    draws_randomness = False

    def __init__(self, kind: str) -> None:
        draw = torch.Generator().manual_seed(5)
        self.lengths = torch.ones(ROWS, dtype=torch.int64).numpy()
        self.x = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
        self.labels = torch.randint(0, 3, (ROWS,), generator=draw)
        if kind != "classes":
            self.labels = torch.rand(ROWS, 3, generator=draw, dtype=torch.float64).round()
        self.weights = torch.randint(0, 4, (ROWS,), generator=draw).double() / 2

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.labels[i], "weight": self.weights[i]}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x)


def plain_next_token(bench, ids):
    """What PyTorch alone makes of a global batch, sample by sample."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for i in ids:
        sample, weight = bench.dataset[i], bench.dataset.of_tokens[i]
        if bench.dataset.kind == "sample":
            weight = weight[:1].expand(len(weight))
        logits = bench.module(sample["input_ids"][None])[0, :-1]
        losses = F.cross_entropy(logits, sample["labels"][1:], reduction="none")
        total = total + (losses * weight[1:]).sum()
        count += float((weight[1:] * (sample["labels"][1:] != -100)).sum())
    return total / count


def plain_of_rows(bench, ids):
    data, ids = bench.dataset, torch.tensor(ids)
    logits, labels, weight = bench.module(data.x[ids]), data.labels[ids], data.weights[ids]
    if labels.dim() == 1:
        return (F.cross_entropy(logits, labels, reduction="none") * weight).sum() / weight.sum()
    entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (entropy.mean(1) * weight).sum() / weight.sum()


@pytest.mark.parametrize("least_bytes", [next_token.LEAST_BYTES, 0])
@pytest.mark.parametrize("kind", ["sample", "token"])
def test_weights_of_samples_and_tokens_are_those_of_plain_pytorch(kind, least_bytes, monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", least_bytes)
    for cut in (Fixed(micro=3), Budget(max_tokens=24)):
        check_step(cut, Weighted(kind), TinyLM, NextToken(), plain_next_token)
    # One that knows nothing of weights makes another step.
    bench = Bench(Fixed(micro=3), dataset=Weighted(kind))
    other = Bench(Fixed(micro=3), dataset=Weighted(kind, is_known=False))
    assert relative_error(other.gradient_and_loss()[0], bench.gradient_and_loss()[0]) > WRONG


@pytest.mark.parametrize(
    ("kind", "objective"),
    [("classes", Classify()), ("flags", Numbers(loss="binary_cross_entropy"))],
    ids=["classify", "multi_label"],
)
def test_weights_of_rows_are_those_of_plain_pytorch(kind, objective):
    for micro in (3, 16):
        check_step(Fixed(micro=micro), Flat(kind), Linear, objective, plain_of_rows)


def check_step(cut, dataset, model, objective, plain):
    bench = Bench(cut, dataset=dataset, model=model, objective=objective)
    ids = Bench(cut, dataset=dataset, model=model, objective=objective).feed.next()
    own = [i for micro_batch in ids.micro_batches for i in micro_batch.ids]
    expected = plain(bench, own)
    grads = torch.autograd.grad(expected, list(bench.module.parameters()))
    names = dict(bench.module.named_parameters())
    found, loss = bench.gradient_and_loss()
    assert loss == pytest.approx(float(expected.detach()), rel=EXACT[torch.float64])
    assert relative_error(found, dict(zip(names, grads, strict=True))) <= 1e-10
    assert bench.verified().exact


def test_a_weight_of_two_is_the_sample_twice_also_in_what_an_evaluation_counts():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    labels, weight = torch.tensor([0, 1, 2, 1, -100]), torch.tensor([2.0, 1, 0, 3, 2])
    again = weight.long()
    names = ["accuracy", "f1", "mcc", "perplexity", "top_2"]
    objective = Classify().with_metrics(names)
    with torch.no_grad():
        weighed = objective.sums(
            lambda fields: fields["x"], {"x": logits, "labels": labels, "weight": weight}
        )
        repeated = {"x": logits, "labels": labels}
        repeated = {n: field.repeat_interleave(again, 0) for n, field in repeated.items()}
        twice = objective.sums(lambda fields: fields["x"], repeated)
    for name, expected in twice.statistics.items():
        assert torch.allclose(weighed.statistics[name].double(), expected.double())
    assert float(weighed.metrics["accuracy"]) == float(twice.metrics["accuracy"])
    fields = {"labels": labels, "weight": weight}
    assert objective.weights(fields) == objective.weights(repeated)


def test_the_fused_loss_counts_rows_by_weight():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, generator=draw, requires_grad=True)
    layer = torch.randn(VOCABULARY, 4, generator=draw, requires_grad=True)
    targets, weight = torch.tensor([1, 2, -100, 4, 5, 6, 0]), torch.arange(7) / 2.0
    found, _ = linear_cross_entropy(hidden, (layer, None), targets, target_weight=weight)
    losses = F.cross_entropy(hidden @ layer.T, targets, reduction="none")
    expected = (losses * weight).sum()
    assert found.item() == pytest.approx(expected.item())
    for ours, theirs in zip(
        torch.autograd.grad(found, [hidden, layer]),
        torch.autograd.grad(expected, [hidden, layer]),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_one_weight_of_a_sample_is_that_of_its_tokens_where_they_are_packed():
    loader = Loader(Weighted("sample"), num_workers=0, seed=0)
    ids = (3, 5, 8)
    total = int(sum(loader.dataset.lengths[i] for i in ids))
    fields = loader.load(Request(ids=ids, epoch=0, pad_to=total, packed=True))
    assert fields["weight"].shape == fields["labels"].shape == (1, total)
    padded = loader.load(Request(ids=ids, epoch=0, pad_to=23))
    objective = NextToken()
    assert objective.weights(fields) == objective.weights(padded)


def test_a_weight_that_is_no_number_of_zero_or_more_is_named_with_its_sample():
    data = Flat("classes")
    data.weights[7] = -1
    with pytest.raises(DataError, match=r"^data: .*7.*: weight holds -1.0; give finite numbers"):
        Loader(data, num_workers=0, seed=0).load(Request(ids=(3, 7), epoch=0, pad_to=1))
    with pytest.raises(ConfigError, match="do not match labels of shape"):
        weight_of({"weight": torch.ones(2, 3)}, torch.zeros(2, 4))
