"""Culprits as they occur in models of one's own: coupled losses, draws in a forward, hidden state.

Each is named where it is, however deep, and its sound twin is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM
from trainer.core.micro_batch import Fields
from trainer.objectives.base import IGNORED, Objective, Sums, logits_of, without_labels
from trainer.objectives.model_loss import ModelLoss
from trainer.objectives.next_token import shifted_labels
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget, Fixed
from trainer.report.records import VerifyReport
from trainer.verify.proof import verify

SORTED = Budget(max_tokens=60)
WIDTH = 8


def checked(bench: Bench, *, whole_fits: bool = True) -> VerifyReport:
    return verify(bench.kit, bench.feed.next(), bench.feed, whole_fits=whole_fits)


def named(bench: Bench) -> Mapping[str, str]:
    report = checked(bench)
    assert not report.exact
    assert report.max_relative_error > WRONG
    return dict(report.culprits)


# Losses that couple samples


def terms_of(model, fields: Fields) -> tuple[Tensor, Tensor]:
    """Logits and shifted labels of the tokens that have a next one."""
    targets = shifted_labels(fields)
    counted = targets != IGNORED
    return logits_of(model(without_labels(fields)))[counted], targets[counted]


class Counting(Objective):
    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"loss": float((shifted_labels(fields) != IGNORED).sum())}


class Contrastive(Counting):
    """Every token is told from all others of its micro-batch."""

    def sums(self, model, fields):
        logits, _ = terms_of(model, fields)
        likeness = logits @ logits.T
        goal = torch.arange(len(logits))
        return Sums(losses={"loss": F.cross_entropy(likeness, goal, reduction="sum")})


class Hardest(Counting):
    """Only the worst term of a micro-batch counts."""

    def sums(self, model, fields):
        logits, targets = terms_of(model, fields)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return Sums(losses={"loss": losses.max() if len(losses) else logits.sum()})


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=3), Fixed(steps=1)], ids=str)
@pytest.mark.parametrize("objective", [Contrastive, Hardest])
def test_a_loss_that_couples_samples_is_named_in_every_cut(objective, cut):
    culprits = named(Bench(cut, objective=objective()))
    assert list(culprits) == [f"objective {objective.__name__}"]
    assert "couples samples" in next(iter(culprits.values()))


class Paired(Counting):
    """Every second sample of a micro-batch is told from the one before it."""

    def sums(self, model, fields):
        logits = logits_of(model(without_labels(fields)))
        summed = logits.masked_fill(fields["labels"][..., None] == IGNORED, 0.0).sum(1)
        even, odd = summed[0::2], summed[1::2]
        return Sums(losses={"loss": F.cosine_similarity(even[: len(odd)], odd).sum()})


def test_a_loss_over_pairs_is_named_though_every_micro_batch_holds_whole_pairs():
    cut = Budget(max_tokens=60, micro=2)
    (slots,) = Bench(cut).feed.next().plan.ranks
    assert [len(slot) for slot in slots] == [2] * 8
    assert list(named(Bench(cut, objective=Paired()))) == ["objective Paired"]


class Uniform(RaggedText):
    """Samples of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = np.full_like(self.lengths, 6)
        self.samples = [torch.arange(6) + i % 5 for i in range(len(self.lengths))]
        self.masked = set()


# What one cut or one batch hides


@pytest.mark.parametrize("cut", [Fixed(micro=4), Budget(max_tokens=24)], ids=str)
def test_a_loss_over_neighbours_is_named_though_the_cut_keeps_them_together(cut):
    bench = Bench(cut, dataset=Uniform(), objective=Paired())
    assert list(named(bench)) == ["objective Paired"]


def test_a_loss_over_declared_groups_is_exact():
    class Grouped(Paired):
        group_size = 2

    layout = Layout(group_size=2)
    for cut in (Fixed(micro=4), Budget(max_tokens=90)):
        for global_batch in (16, 15):
            bench = Bench(cut, objective=Grouped(), layout=layout, global_batch=global_batch)
            assert checked(bench).exact


class EvenMean(Objective):
    """A mean with a weight of one: right only while all micro-batches are of one size."""

    def weights(self, fields) -> Mapping[str, float]:
        return {"loss": 1.0}

    def sums(self, model, fields):
        return Sums(losses={"loss": F.cross_entropy(*terms_of(model, fields))})


@pytest.mark.parametrize("whole_fits", [True, False])
def test_a_mean_that_even_micro_batches_hide_is_named(whole_fits):
    bench = Bench(Fixed(micro=4), dataset=Uniform(), objective=EvenMean())
    report = checked(bench, whole_fits=whole_fits)
    assert not report.exact
    assert report.max_relative_error <= 1e-10
    assert {name for name, _ in report.culprits} == {"objective EvenMean"}
    assert any("is no sum" in reason for _, reason in report.culprits)
    assert any("by accident" in note for note in report.notes)


def test_dropout_does_not_excuse_a_mean_that_even_micro_batches_hide():
    settings = {"dataset": Uniform(), "objective": EvenMean()}
    report = checked(Bench(Fixed(micro=4), model=lambda: TinyLM(dropout=0.2), **settings))
    assert report.verdict == "not_exact"
    assert {name for name, _ in report.culprits} == {"dropout", "objective EvenMean"}


class Signed(Objective):
    """Terms that cancel nearly, and a metric that is counted in its own way."""

    def weights(self, fields) -> Mapping[str, float]:
        return {"loss": float(len(fields["input_ids"])), "runs": 1.0}

    def sums(self, model, fields):
        logits, targets = terms_of(model, fields)
        loss = F.cross_entropy(logits, targets, reduction="none")
        return Sums(losses={"loss": 1e9 * (loss - loss.detach()).sum()})


def test_sums_that_cancel_and_weights_of_metrics_are_no_fault():
    assert checked(Bench(Fixed(micro=3), objective=Signed())).exact


# Draws, wherever they are


class Block(nn.Module):
    """One residual block whose forward does what it is given to a hidden state."""

    def __init__(self, change: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH)})
        self.change = change

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.change(self.inner["linear"](hidden), self.training)


class Deep(nn.Module):
    """Blocks, of which the second alone is out of the ordinary."""

    def __init__(self, change: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        plain: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        plain[1] = Block(change)
        self.blocks = nn.Sequential(*plain)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(input_ids)))


def attention_dropout(hidden: Tensor, training: bool) -> Tensor:
    rate = 0.3 if training else 0.0
    return F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=rate, is_causal=True)


QUIET = {
    "dropout": lambda hidden, training: F.dropout(hidden, 0.3, training),
    "attention dropout": attention_dropout,
    "bernoulli": lambda hidden, training: (
        hidden * torch.bernoulli(torch.full_like(hidden, 0.7)) if training else hidden
    ),
    "whole paths": lambda hidden, training: hidden * (torch.rand(()) > 0.5) if training else hidden,
}
LOUD = {
    "noise": lambda hidden, training: hidden + torch.rand_like(hidden),
    "dropout with no mode": lambda hidden, training: F.dropout(hidden, 0.3),
    "numbers of its own": lambda hidden, training: hidden * torch.empty(()).uniform_(0.5, 1.5),
    "permutation": lambda hidden, training: hidden[..., torch.randperm(WIDTH)],
}


@pytest.mark.parametrize("kind", QUIET)
def test_draws_of_a_forward_are_named_at_the_innermost_module_and_exact_when_off(kind):
    culprits = named(Bench(SORTED, model=lambda: Deep(QUIET[kind])))
    assert list(culprits) == ["blocks.1"]
    assert "Block draws at random" in culprits["blocks.1"]
    assert "the step is exact with it off" in culprits["blocks.1"]


@pytest.mark.parametrize("kind", LOUD)
def test_draws_that_evaluation_mode_does_not_stop_are_named_too(kind):
    report = checked(Bench(SORTED, model=lambda: Deep(LOUD[kind])))
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert name == "blocks.1"
    assert "in evaluation mode too" in reason


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
    report = checked(Bench(SORTED, model=lambda: Routed(0.01), objective=ModelLoss()))
    assert [name for name, _ in report.culprits] == ["Routed.aux_loss"]
    assert "load balance" in report.culprits[0][1]
    dropping = Bench(SORTED, model=lambda: Routed(0.01, dropout=0.1), objective=ModelLoss())
    assert [name for name, _ in checked(dropping).culprits] == ["Routed.aux_loss", "dropout"]
    assert checked(Bench(SORTED, model=lambda: Routed(0.0), objective=ModelLoss())).exact
    whole = Bench(Fixed(micro=16), model=lambda: Routed(0.01), objective=ModelLoss())
    assert checked(whole).exact


# Behind gates, and in state


class Gated(nn.Module):
    """A branch behind a gate that begins at zero."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.inner(hidden)


class Centred(nn.Module):
    """Centres over its micro-batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean((0, 1))


class BatchNorm(nn.BatchNorm1d):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


def gated(inner: nn.Module) -> nn.Module:
    model = TinyLM(WIDTH)
    model.dropout = Gated(inner)
    return model


@pytest.mark.parametrize(
    ("inner", "words"),
    [(lambda: BatchNorm(WIDTH), "normalises over the samples"), (Centred, "its micro-batch")],
)
def test_a_module_behind_a_gate_at_zero_is_named(inner, words):
    report = checked(Bench(Fixed(micro=3), model=lambda: gated(inner())))
    assert not report.exact
    [(name, reason)] = report.culprits
    assert name == "dropout.inner"
    assert words in reason


class Moving(nn.Module):
    """Moves a frozen parameter and an attribute in forward, and draws for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.calls, self.own = [0], np.random.default_rng(0)

    def forward(self, hidden: Tensor) -> Tensor:
        self.own.random()
        self.calls[0] += 1
        self.code.data.mul_(0.9).add_(hidden.detach().mean((0, 1)) + 0.01)
        return hidden + self.code + 0.01 * self.calls[0]


class Caching(nn.Module):
    """Draws from NumPy, and remembers what it drew."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.last = float(np.random.default_rng().random())
        return hidden * self.last


@pytest.mark.parametrize(
    ("mixer", "words"), [(Moving, "keeps state"), (Caching, "no seed of the run governs")]
)
def test_state_that_moves_is_told_from_draws_that_no_seed_governs(mixer, words):
    def build() -> nn.Module:
        model = TinyLM(WIDTH)
        model.dropout = mixer()
        return model

    culprits = named(Bench(Fixed(micro=3), model=build))
    assert words in culprits["dropout"]


# Precision


class HandCast(nn.Module):
    """Weights in fp32; one layer computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = TinyLM(WIDTH), nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, weight = self.body(input_ids).bfloat16(), self.last.weight.to(torch.bfloat16)
        return F.linear(hidden, weight).float() + self.last.bias


class HalfLow(HandCast):
    """One layer holds its weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body.head.to(torch.bfloat16)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.body.mix(self.body.embed(input_ids))
        return self.last(self.body.head(hidden.to(self.body.head.weight.dtype)).float())


@dataclass
class AsBuilt(Bench):
    """LayoutInvariant the model in the precision that it was built in."""

    def __post_init__(self) -> None:
        build = self.model

        def keep() -> nn.Module:
            model = build()
            model.to = lambda *_: model
            return model

        self.model = keep
        super().__post_init__()
        del self.module.to


def test_casts_by_hand_are_undone_and_said_to_be():
    report = checked(AsBuilt(SORTED, model=HandCast))
    assert report.exact, report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.notes == ("casts to bfloat16 by hand in the model are undone in float64",)


@pytest.mark.parametrize("cut", [Fixed(micro=1), Fixed(micro=4)], ids=str)
def test_one_layer_of_low_precision_weights_is_enough_to_be_named(cut):
    report = checked(AsBuilt(cut, model=HalfLow))
    assert not report.exact
    assert [name for name, _ in report.culprits] == ["parameters"]
    assert "bfloat16 weights" in report.culprits[0][1]
    assert "the plan in float64: " in report.culprits[0][1]
