"""What a comparison must put back, and what a copy of a model cannot show."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.lib.nightly import nightly
from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, TinyLM
from trainer.objectives.base import Sums
from trainer.objectives.next_token import NextToken
from trainer.plan.cuts import Budget, Fixed

SORTED = Budget(max_tokens=60)
WIDTH = 8


class FirstScale(TinyLM):
    """Begins a weight by the first micro-batch that it sees (ActNorm, Kingma and Dhariwal 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.has_begun = nn.Parameter(torch.ones(VOCABULARY)), False

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        if not self.has_begun:
            with torch.no_grad():
                self.scale.copy_(1 / (logits.std((0, 1), correction=0) + 0.1))
            self.has_begun = True
        return logits * self.scale


class InObject(TinyLM):
    """State in a plain helper."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = SimpleNamespace(mean=torch.zeros(VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        self.tracker.mean = 0.9 * self.tracker.mean + 0.1 * logits.detach().mean((0, 1))
        return logits * (1 + self.tracker.mean)


@pytest.mark.parametrize("model", [FirstScale, InObject])
def test_state_that_the_first_micro_batches_leave_behind_is_no_common_ground(model):
    report = Bench(SORTED, model=model).verified()
    assert report.max_relative_error > WRONG
    [(name, reason)] = report.culprits
    assert name.startswith(model.__name__)
    assert "keeps state" in reason


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


@pytest.mark.parametrize(
    ("at", "couples"), [("model", True), ("module", False), nightly("module", True), ("hook", True)]
)
def test_a_function_that_holds_the_model_itself_proves_nothing_and_is_named(at, couples):
    report = Bench(SORTED, torch.float32, model=lambda: Patched(at, couples)).verified()
    assert report.verdict in ({"not_proven", "not_exact"} if couples else {"not_proven"})
    assert "nothing is proven" in report.culprits[-1][1]


@pytest.mark.parametrize(
    ("method", "cut"),
    [("register_hook", SORTED), ("register_post_accumulate_grad_hook", Fixed(micro=16))],
)
def test_a_hook_on_a_gradient_proves_nothing_and_is_named(method, cut):
    def model() -> nn.Module:
        built = TinyLM(WIDTH)
        getattr(built.head.weight, method)(lambda _: None)
        return built

    report = Bench(cut, model=model).verified()
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert (name, method in reason, "nothing is proven" in reason) == ("head.weight", True, True)


class Keeping(TinyLM):
    """Keeps tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, input_ids: Tensor) -> Tensor:
        self.last = input_ids
        return super().forward(input_ids) * self.scale


def test_tensors_in_plain_attributes_are_named_once():
    report = Bench(SORTED, model=Keeping).verified()
    assert report.exact
    (note,) = [note for note in report.notes if "plain attribute" in note]
    assert note.startswith("last, scale: ")


class Complex(TinyLM):
    """Turns in the complex plane."""

    def __init__(self, couples: bool = False) -> None:
        super().__init__()
        self.couples = couples
        self.turn = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.complex64))

    def to(self, *_args: object, **_kwargs: object) -> Complex:  # would drop imaginary parts
        return self

    def forward(self, input_ids: Tensor) -> Tensor:
        turned = (super().forward(input_ids).to(torch.complex64) * self.turn).imag
        return turned - self.couples * turned.mean() * turned


@pytest.mark.parametrize("couples", [False, True])
def test_complex_weights_keep_their_imaginary_parts(couples):
    report = Bench(SORTED, torch.float32, model=lambda: Complex(couples)).verified()
    assert report.exact != couples, report.culprits
    assert (report.max_relative_error > WRONG) == couples
    assert (report.dtype, report.num_parameters) == ("float64", 10)


class Normed(TinyLM):
    """A weight that is computed anew in every forward, and held in between."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.head)


def test_computed_weights_are_compared_like_others():
    report = Bench(SORTED, model=Normed).verified()
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
    report = Bench(SORTED, objective=objective).verified()
    assert report.culprits[0][0] == "objective FirstLoss"
    assert "first" not in vars(objective)
