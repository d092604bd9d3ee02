"""What a comparison must put back, and what a copy of a model cannot show."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, TinyLM
from trainer.objectives.base import Sums
from trainer.objectives.next_token import NextToken
from trainer.plan.cut import Cut
from trainer.plan.cuts import Budget, Fixed
from trainer.report.records import VerifyReport
from trainer.verify.proof import verify

SORTED = Budget(max_tokens=60)
WIDTH = 8


def verified(model: Callable[[], nn.Module], cut: Cut = SORTED, **settings) -> VerifyReport:
    bench = Bench(cut, model=model, **settings)
    before = bench.parameters()
    report = verify(bench.kit, bench.feed.next(), bench.feed, whole_fits=True)
    assert all(torch.equal(value, before[name]) for name, value in bench.parameters().items())
    assert all(parameter.grad is None for parameter in bench.module.parameters())
    return report


class Mixed(TinyLM):
    """Does something of its own to what the norm gives."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mixed(self.norm(self.mix(self.embed(input_ids))[0])))

    def mixed(self, hidden: Tensor) -> Tensor:
        return hidden


class FirstScale(Mixed):
    """Begins a weight by the first micro-batch that it sees (ActNorm, Kingma and Dhariwal 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.has_begun = nn.Parameter(torch.ones(WIDTH)), False

    def mixed(self, hidden: Tensor) -> Tensor:
        if not self.has_begun:
            with torch.no_grad():
                self.scale.copy_(1 / (hidden.std((0, 1), correction=0) + 0.1))
            self.has_begun = True
        return hidden * self.scale


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


@pytest.mark.parametrize("model", [FirstScale, InObject])
def test_state_that_the_first_micro_batches_leave_behind_is_no_common_ground(model):
    report = verified(model)
    assert not report.exact
    assert report.max_relative_error > WRONG
    (culprit,) = report.culprits
    assert culprit[0].startswith(model.__name__)
    assert "keeps state" in culprit[1]


class Patched(TinyLM):
    """Has its forward, its head's or a hook exchanged for a function that holds the model."""

    def __init__(self, at: str, couples: bool) -> None:
        super().__init__()

        def out(logits: Tensor) -> Tensor:
            return logits - couples * logits.mean() * self.head.bias.exp()

        whole, head = self.forward, self.head.forward
        if at == "model":
            self.forward = lambda input_ids: out(whole(input_ids))  # type: ignore[method-assign]
        if at == "module":
            self.head.forward = lambda hidden: out(head(hidden))  # type: ignore[method-assign]
        if at == "hook":
            self.head.register_forward_hook(lambda _module, _taken, given: out(given))


@pytest.mark.parametrize("couples", [False, True])
@pytest.mark.parametrize("at", ["model", "module", "hook"])
def test_a_function_that_holds_the_model_itself_proves_nothing_and_is_named(at, couples):
    report = verified(lambda: Patched(at, couples), dtype=torch.float32)
    assert report.verdict in ({"not_proven", "not_exact"} if couples else {"not_proven"})
    assert "nothing is proven" in report.culprits[-1][1]


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=16)], ids=["cut", "one piece"])
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_proves_nothing_and_is_named(method, cut):
    def model() -> nn.Module:
        built = TinyLM(WIDTH)
        getattr(built.head.weight, method)(lambda _: None)
        return built

    report = verified(model, cut)
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert name == "head.weight"
    assert method in reason
    assert "nothing is proven" in reason


class Keeping(TinyLM):
    """Keeps tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, input_ids: Tensor) -> Tensor:
        self.last = input_ids
        return super().forward(input_ids) * self.scale


def test_tensors_in_plain_attributes_are_named_once():
    report = verified(Keeping)
    assert report.exact
    (note,) = [note for note in report.notes if "plain attribute" in note]
    assert note.startswith("last, scale: ")
    assert not verified(TinyLM).notes


class Complex(Mixed):
    """Turns in the complex plane."""

    def __init__(self, couples: bool = False) -> None:
        super().__init__()
        self.couples, self.turn = couples, nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def to(self, *_args: object, **_kwargs: object) -> Complex:  # would drop imaginary parts
        return self

    def mixed(self, hidden: Tensor) -> Tensor:
        turned = (hidden.to(torch.complex64) * self.turn).imag
        return turned - self.couples * turned.mean()


def test_complex_weights_keep_their_imaginary_parts():
    report = verified(Complex, dtype=torch.float32)
    assert report.exact, report.culprits
    assert (report.dtype, report.num_parameters) == ("float64", 10)
    coupled = verified(lambda: Complex(couples=True), dtype=torch.float32)
    assert coupled.max_relative_error > WRONG


class Normed(TinyLM):
    """A weight that is computed anew in every forward, and held in between."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.head)


def test_computed_weights_are_compared_like_others():
    report = verified(Normed)
    assert report.exact, report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]


class FirstLoss(NextToken):  # type: ignore[misc] # final
    """Scales by the first loss that it sees."""

    def sums(self, model, fields):
        total = super().sums(model, fields).losses["cross_entropy"]
        vars(self).setdefault("first", float(total.detach()))
        return Sums(losses={"cross_entropy": total / self.first})


def test_an_objective_that_keeps_state_is_named_and_left_as_it_was():
    objective = FirstLoss()
    report = verified(TinyLM, objective=objective)
    assert not report.exact
    assert report.culprits[0][0] == "objective FirstLoss"
    assert "first" not in vars(objective)
