"""What counts as rounding in `train verify`: no fault hides in a small gradient, no noise alarms.

And what a comparison is made in: float64, float32 where a model knows no other, memory permitting.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.run_toys import Cramped
from tests.lib.support import EXACT, VOCABULARY, Bench, TinyLM
from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.plan.cuts import Budget, Fixed
from trainer.report.records import VerifyReport
from trainer.verify.comparison import compared
from trainer.verify.proof import verify

SORTED = Budget(max_tokens=60)
WIDTH = 8
LIMIT = 1e-10


def checked(bench: Bench, *, whole_fits: bool = True) -> VerifyReport:
    return verify(bench.kit, bench.feed.next(), bench.feed, whole_fits=whole_fits)


@dataclass(frozen=True)
class Faulty(GradientStrategy):
    """Gets one parameter's gradient wrong where there are several micro-batches.

    By a factor that grows with their number, or by a constant.
    """

    name: str
    fault: float = 0.0
    offset: float = 0.0

    def backward(self, model, objective, micro_batches, divisors, sync):
        loss = Sum().backward(model, objective, micro_batches, divisors, sync)
        gradient = dict(model.module.named_parameters())[self.name].grad
        gradient *= 1 + self.fault * (len(micro_batches) - 1)
        gradient += self.offset * (len(micro_batches) > 1)
        return loss


class Spanning(nn.Module):
    """Branches whose gradients are 1, 1e-2, 1e-4 and 1e-6 of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.body.mix(self.body.embed(input_ids))
        logits = self.body.head(hidden)
        for index, branch in enumerate(self.branches):
            logits = logits + 100.0**-index * branch(hidden)
        return logits


class Keyed(nn.Module):
    """Attention with a key projection of its own, whose bias has no gradient on paper."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        projected = (layer(hidden) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*projected, is_causal=True)
        return self.head(hidden + mixed)


class Cancelling(nn.Module):
    """A parameter whose gradient is a hundred-millionth of the terms it is the sum of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyLM(WIDTH)
        self.shift = nn.Parameter(torch.zeros(()))
        self.register_buffer("weights", 1 + 1e-8 * torch.arange(VOCABULARY, dtype=torch.float64))

    def forward(self, input_ids: Tensor) -> Tensor:
        # A softmax minds no common shift.
        return self.body(input_ids) + self.shift * self.weights


class Amplifying(nn.Module):
    """Loses digits on the way."""

    def __init__(self, factor: float = 1e8) -> None:
        super().__init__()
        self.factor = factor
        self.body = TinyLM(WIDTH)
        self.scale = nn.Parameter(torch.full((VOCABULARY,), 0.3))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.body(input_ids)
        large = logits * (self.scale * self.factor)
        return logits + large - logits * (self.scale * (self.factor - 1.0))


# Small gradients


@pytest.mark.parametrize("whole_fits", [True, False])
def test_gradients_that_span_six_orders_of_magnitude_are_exact_without_an_excuse(whole_fits):
    report = checked(Bench(SORTED, torch.float32, model=Spanning), whole_fits=whole_fits)
    assert report.exact
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.limit == LIMIT
    assert not any("rounding alone" in note for note in report.notes)


@pytest.mark.parametrize("index", range(4))
def test_a_millionth_of_a_fault_shows_however_small_the_gradient_it_is_in(index):
    name = f"branches.{index}.weight"
    report = checked(Bench(SORTED, model=Spanning, strategy=Faulty(name, 1e-6)))
    assert not report.exact
    (worst, error), (_, next_error) = report.worst[:2]
    assert worst == name
    faults = (report.micro_batches - 1) * 1e-6
    assert error == report.max_relative_error == pytest.approx(faults, rel=1e-6)
    assert next_error <= EXACT[torch.float64]


def unmeasured(amount: float) -> dict[str, float]:
    pytest.fail(f"rounding was not in question, but {amount}")


def test_the_reported_error_is_the_largest_difference_over_the_largest_reference():
    expected = {"large": torch.tensor([3.0, -1.0]), "small": torch.tensor([2e-6, -4e-6])}
    found = {"large": torch.tensor([3.0, -1.0]), "small": torch.tensor([2e-6, -3e-6])}
    errors = compared(found, expected, torch.float64, unmeasured)
    assert errors.by_name == {"large": 0.0, "small": pytest.approx(0.25)}
    errors = compared(
        found | {"large": torch.tensor([3.0, float("nan")])}, expected, torch.float64, unmeasured
    )
    assert errors.by_name["large"] == float("inf")
    assert not errors.is_exact


# Gradients that are zero on paper


@pytest.mark.parametrize("cut", [SORTED, Fixed(micro=3), Fixed(steps=1)], ids=str)
def test_a_gradient_of_zero_on_paper_raises_no_alarm_and_is_named_and_a_fault_in_it_shows(cut):
    report = checked(Bench(cut, torch.float32, model=Keyed), whole_fits=False)
    assert report.exact
    assert report.max_relative_error <= EXACT[torch.float64]
    assert report.notes[-1].startswith("key.bias: a gradient of rounding alone")
    if cut is SORTED:
        report = checked(Bench(cut, model=Keyed, strategy=Faulty("key.bias", offset=1e-8)))
        assert not report.exact
        assert report.worst[0][0] == "key.bias"
        assert report.max_relative_error < 1.0


def test_a_gradient_that_rounding_alone_blurs_beyond_the_limit_raises_no_alarm():
    report = checked(Bench(SORTED, model=Cancelling))
    assert report.exact, report.worst
    assert any(note.startswith("shift: a gradient of rounding alone") for note in report.notes)
    report = checked(Bench(SORTED, model=Cancelling, strategy=Faulty("shift", 1e-6)))
    assert not report.exact
    assert report.worst[0][0] == "shift"


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(Amplifying, "float64"), (lambda: Single(lambda: Amplifying(2e4)), "float32")],
    ids=["float64", "float32"],
)
def test_a_model_that_amplifies_rounding_proves_nothing_and_no_module_is_blamed(model, dtype):
    report = checked(Bench(SORTED, torch.float32, model=model))
    assert (report.verdict, report.dtype) == ("not_proven", dtype)
    [(name, reason)] = report.culprits
    assert name == "rounding"
    assert "moved by their last bit" in reason


def test_weights_of_low_precision_do_not_blow_up_a_gradient_of_zero_on_paper():
    report = checked(Bench(SORTED, torch.bfloat16, model=Keyed))
    assert not report.exact
    assert 1e-3 < report.max_relative_error < 1.0
    assert "the planned step in bfloat16, as the weights are" in report.notes


# Models that know no float64


class Single(nn.Module):
    """Refuses float64."""

    def __init__(self, model=TinyLM) -> None:
        super().__init__()
        self.body = model()

    def forward(self, input_ids: Tensor) -> Tensor:
        if next(self.parameters()).dtype != torch.float32:
            raise NotImplementedError("no kernel for Double")
        return self.body(input_ids)


def test_float32_is_held_against_the_models_own_rounding_and_says_so():
    report = checked(Bench(SORTED, torch.float32, model=Single))
    assert (report.exact, report.dtype) == (True, "float32")
    assert 0 < report.max_relative_error <= report.limit < 1e-5
    [note] = report.notes
    assert "does not run in float64 (NotImplementedError: no kernel for Double)" in note


@pytest.mark.parametrize("model", [Keyed, Spanning])
def test_float32_noise_raises_no_alarm_in_small_gradients(model):
    report = checked(Bench(SORTED, torch.float32, model=lambda: Single(model)))
    assert (report.exact, report.dtype) == (True, "float32"), report.worst


@pytest.mark.parametrize("index", [0, 3])
def test_a_fault_far_below_one_in_ten_thousand_shows_in_float32(index):
    name, model = f"body.branches.{index}.weight", lambda: Single(Spanning)
    report = checked(Bench(SORTED, torch.float32, model=model, strategy=Faulty(name, 5e-6)))
    assert (report.exact, report.dtype) == (False, "float32")
    assert report.worst[0][0] == name
    assert report.limit < report.max_relative_error < 1e-4


# Memory


def cramped(limit: int, **given) -> Bench:
    return Bench(strategy=Cramped(limit=limit), dtype=torch.float32, **given)


def test_running_out_of_memory_in_float64_cuts_finer_and_never_falls_back_to_float32():
    report = checked(cramped(60_000, cut=Budget(max_tokens=120)))
    assert (report.exact, report.dtype) == (True, "float64")
    assert any("do not fit into memory in float64" in note for note in report.notes)
    assert report.micro_batches > checked(Bench(Budget(max_tokens=120))).micro_batches


def test_a_whole_batch_that_runs_out_of_memory_gives_way_to_its_samples_one_by_one():
    report = checked(cramped(150_000, cut=SORTED))
    assert (report.exact, report.dtype) == (True, "float64")
    assert report.reference == "sample by sample, summed"
    assert "the whole batch in one piece ran out of memory in float64" in report.notes


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (cramped(2_000, cut=SORTED), r"sample \d+ of \d+ tokens .* in float64, even alone"),
        (
            cramped(30_000, cut=Fixed(micro=4), normalizer="micro_batches"),
            "a mean of means changes with the cut",
        ),
    ],
    ids=["one sample", "mean of means"],
)
def test_what_does_not_fit_in_float64_and_cannot_be_cut_ends_with_its_name(bench, words):
    with pytest.raises(DoesNotFitError, match=words):
        checked(bench)


def test_a_model_that_runs_on_the_planned_groups_alone_is_a_mistake_in_the_model():
    class Four(TinyLM):
        def forward(self, input_ids: Tensor) -> Tensor:
            if len(input_ids) != 6:
                raise RuntimeError("made for six")
            return super().forward(input_ids)

    bench = Bench(Fixed(micro=6), global_batch=12, model=Four)
    with pytest.raises(ConfigError, match=r"on no group of samples .*made for six"):
        checked(bench)
