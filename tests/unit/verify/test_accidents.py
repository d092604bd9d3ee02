"""What is exact by accident of one cut, and culprits that hide: behind gates, in state."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.support import Bench, RaggedText, TinyLM
from tests.unit.verify.test_coupling import Paired, Uniform, checked, named, terms_of
from tests.unit.verify.test_proof import Capacity
from trainer.objectives.base import Objective, Sums
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget, Fixed
from trainer.verify.proof import verify

WIDTH = 8


@pytest.mark.parametrize("cut", [Fixed(micro=4), Budget(max_tokens=24)], ids=str)
def test_a_loss_over_neighbours_is_named_though_the_cut_keeps_them_together(cut):
    bench = Bench(cut, dataset=Uniform(), objective=Paired())
    assert list(named(bench)) == ["objective Paired"]


def test_a_loss_over_declared_groups_is_exact():
    class Grouped(Paired):
        group_size = 2

    layout = Layout(group_size=2)
    for cut in (Fixed(micro=4), Budget(max_tokens=90)):
        for global_size in (16, 15):
            bench = Bench(cut, objective=Grouped(), layout=layout, global_size=global_size)
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
    report = verify(bench.kit, bench.feed.next(), bench.loader, whole_fits=whole_fits)
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


class Gated(nn.Module):
    """A branch behind a gate that begins at zero."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.inner(hidden)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


def gated(inner: nn.Module) -> nn.Module:
    model = TinyLM(WIDTH)
    model.dropout = Gated(inner)
    return model


@pytest.mark.parametrize(
    ("inner", "said"),
    [(lambda: BatchNorm(WIDTH), "normalises over the samples"), (Capacity, "its micro-batch")],
)
def test_a_module_behind_a_gate_at_zero_is_named(inner, said):
    report = checked(Bench(Fixed(micro=3), dataset=RaggedText(), model=lambda: gated(inner())))
    assert not report.exact
    [(name, reason)] = report.culprits
    assert name == "dropout.inner"
    assert said in reason


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
    ("mixer", "said"), [(Moving, "keeps state"), (Caching, "no seed of the run governs")]
)
def test_state_that_moves_is_told_from_draws_that_no_seed_governs(mixer, said):
    def build() -> nn.Module:
        model = TinyLM(WIDTH)
        model.dropout = mixer()
        return model

    culprits = named(Bench(Fixed(micro=3), model=build))
    assert said in culprits["dropout"]
