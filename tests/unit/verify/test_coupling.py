"""Culprits as they occur in models of one's own: coupled losses, draws in a forward, low precision.

Each is named where it is, however deep, and its sound twin is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM
from tests.unit.verify.test_proof import Capacity
from trainer.core.micro_batch import Fields
from trainer.objectives.base import IGNORED, Objective, Sums, logits_of, without_labels
from trainer.objectives.next_token import NextToken, shifted_labels
from trainer.plan.cuts import Budget, Fixed
from trainer.report.records import VerifyReport
from trainer.verify.proof import verify

SORTED = Budget(max_tokens=60)
WIDTH = 8


def checked(bench: Bench) -> VerifyReport:
    return verify(bench.kit, bench.feed.next(), bench.loader, whole_fits=True)


def named(bench: Bench) -> Mapping[str, str]:
    report = checked(bench)
    assert not report.exact
    assert report.max_relative_error > WRONG
    return dict(report.culprits)


# Losses that couple samples


def terms_of(model, fields: Fields) -> tuple[Tensor, Tensor]:
    """Logits and shifted labels of the tokens that have a next one."""
    targets = shifted_labels(fields)
    kept = targets != IGNORED
    return logits_of(model(without_labels(fields)))[kept], targets[kept]


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


class Standardised(Counting):
    """Logits over their deviation in the micro-batch."""

    def sums(self, model, fields):
        logits, targets = terms_of(model, fields)
        logits = logits / (1e-3 + logits.std(unbiased=False)) if len(logits) else logits
        return Sums(losses={"loss": F.cross_entropy(logits, targets, reduction="sum")})


class Hardest(Counting):
    """Only the worst term of a micro-batch counts."""

    def sums(self, model, fields):
        logits, targets = terms_of(model, fields)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return Sums(losses={"loss": losses.max() if len(losses) else logits.sum()})


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=3), Fixed(steps=1)], ids=str)
@pytest.mark.parametrize("objective", [Contrastive, Standardised, Hardest])
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
    culprits = named(Bench(SORTED, model=lambda: Deep(LOUD[kind])))
    assert list(culprits) == ["blocks.1"]
    assert "in evaluation mode too" in culprits["blocks.1"]


class DropsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.dropout(self.body(input_ids), 0.2, self.training)


def test_a_draw_in_the_forward_of_the_model_itself_names_the_model():
    assert list(named(Bench(SORTED, model=DropsItself))) == ["DropsItself (in its own forward)"]


# Modules that couple samples, deep inside


class Routed(nn.Module):
    """A layer of experts in the second of three blocks."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.Tanh(), Capacity(factor)),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(input_ids)))


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=3)], ids=str)
def test_capacity_routing_deep_inside_is_named_by_its_path(cut):
    culprits = named(Bench(cut, model=lambda: Routed(0.5)))
    assert list(culprits) == ["blocks.1.1"]
    assert "capacity routing" in culprits["blocks.1.1"]
    assert checked(Bench(cut, model=lambda: Routed(1e9))).exact


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


def test_the_same_model_in_float32_is_exact():
    assert checked(AsBuilt(SORTED, model=TinyLM, objective=NextToken())).exact
