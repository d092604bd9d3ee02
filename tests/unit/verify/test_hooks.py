"""What a copy of a model cannot show, and what only looks like another fault."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.support import VOCABULARY, Bench, TinyLM
from trainer.objectives.base import IGNORED
from trainer.objectives.model_loss import ModelLoss
from trainer.plan.cuts import Budget, Fixed
from trainer.report.records import VerifyReport
from trainer.verify.proof import verify

SORTED = Budget(max_tokens=60)
WIDTH = 8


def verified(model, cut=SORTED, **settings) -> VerifyReport:
    bench = Bench(cut, model=model, **settings)
    before = bench.parameters()
    report = verify(bench.kit, bench.feed.next(), bench.loader, whole_fits=True)
    assert all(torch.equal(value, before[name]) for name, value in bench.parameters().items())
    return report


def with_hook(kind: str) -> nn.Module:
    """A hook of one kind on the gradient of the head."""
    model = TinyLM(WIDTH)
    weight = model.head.weight
    if kind == "before":
        weight.register_hook(lambda gradient: gradient / (1e-9 + gradient.norm()))
    else:
        sgd = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _: sgd.step())
    return model


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=16)], ids=["cut", "one piece"])
@pytest.mark.parametrize(("kind", "method"), [("before", "register_hook"), ("after", "post_acc")])
def test_a_hook_on_a_gradient_proves_nothing_and_is_named(kind, method, cut):
    report = verified(lambda: with_hook(kind), cut)
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert name == "head.weight"
    assert method in reason
    assert "nothing is proven" in reason


class Late(nn.Module):
    """A running mean that its first forward registers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.center: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        mean = hidden.detach().mean((0, 1))
        if self.center is None:
            del self.center
            self.register_buffer("center", mean.clone())
        else:
            self.center.mul_(0.9).add_(mean, alpha=0.1)
        return self.head(hidden - self.center)


class InObject(nn.Module):
    """State in a plain helper."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.tracker = SimpleNamespace(mean=torch.zeros(WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        self.tracker.mean = 0.9 * self.tracker.mean + 0.1 * hidden.detach().mean((0, 1))
        return self.head(hidden - self.tracker.mean)


@pytest.mark.parametrize("model", [Late, InObject])
def test_state_that_a_forward_makes_or_a_helper_holds_is_called_state(model):
    (culprit,) = verified(model).culprits
    assert culprit[0].startswith(model.__name__)
    assert "keeps state" in culprit[1]


class Routed(nn.Module):
    """A head with a router's load balance in its own loss."""

    def __init__(self, coefficient: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(4))
        self.coefficient, self.dropout = coefficient, nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> object:
        hidden = self.dropout(self.embed(input_ids))
        shares = self.gate(hidden).softmax(-1)
        logits = sum(shares[..., i, None] * each(hidden) for i, each in enumerate(self.experts))
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(*flat, reduction="sum") / num_items_in_batch
        real = labels != IGNORED
        aux = 4 * (shares[real].sum(0) / real.sum().clamp(min=1)).square().sum()
        return SimpleNamespace(loss=loss + self.coefficient * aux, logits=logits, aux_loss=aux)


def test_the_balance_of_a_router_within_the_loss_is_named_and_not_its_gate():
    report = verified(lambda: Routed(0.01), objective=ModelLoss())
    assert [name for name, _ in report.culprits] == ["Routed.aux_loss"]
    assert "load balance" in report.culprits[0][1]
    dropping = verified(lambda: Routed(0.01, dropout=0.1), objective=ModelLoss())
    assert [name for name, _ in dropping.culprits] == ["Routed.aux_loss", "dropout"]
    assert verified(lambda: Routed(0.0), objective=ModelLoss()).exact
    assert verified(lambda: Routed(0.01), Fixed(micro=16), objective=ModelLoss()).exact
