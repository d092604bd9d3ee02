"""What a comparison is made of: what counts as rounding, in which precision, on what copy.

No fault hides in a small gradient, no noise alarms; what a copy cannot show proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.run_toys import Cramped
from tests.lib.support import EXACT, VOCABULARY, Bench, TinyLM
from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.core.errors import DoesNotFitError
from trainer.plan.cuts import Budget, Fixed
from trainer.verify.comparison import compared

SORTED = Budget(max_tokens=60)
WIDTH = 8


@dataclass(frozen=True)
class Faulty(GradientStrategy):
    """Gets one parameter's gradient wrong where there are several micro-batches.

    By a factor that grows with their number, or by a constant.
    """

    name: str
    fault: float = 0.0
    offset: float = 0.0

    def micro_batch(self, *given):
        return Sum().micro_batch(*given)

    def walk(self, model, objective, micro_batches, *given, **how):
        found = super().walk(model, objective, micro_batches, *given, **how)
        gradient = dict(model.module.named_parameters())[self.name].grad
        gradient *= 1 + self.fault * (len(micro_batches) - 1)
        gradient += self.offset * (len(micro_batches) > 1)
        return found


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


class Amplifying(TinyLM):
    """Loses digits on the way."""

    def __init__(self, factor: float = 1e8) -> None:
        super().__init__()
        self.factor, self.scale = factor, nn.Parameter(torch.full((VOCABULARY,), 0.3))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        large = logits * (self.scale * self.factor)
        return logits + large - logits * (self.scale * (self.factor - 1.0))


class Single(nn.Module):
    """Refuses float64."""

    def __init__(self, model: Callable[[], nn.Module] = TinyLM) -> None:
        super().__init__()
        self.body = model()

    def forward(self, input_ids: Tensor) -> Tensor:
        if next(self.parameters()).dtype != torch.float32:
            raise NotImplementedError("no kernel for Double")
        return self.body(input_ids)


def single(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Single(model)


# What is rounding, and what is not


ZERO = "differs by no more than the rounding of larger terms"


@pytest.mark.parametrize(
    ("model", "cut", "dtype", "note"),
    [
        (Spanning, SORTED, "float64", None),
        (Keyed, SORTED, "float64", f"key.bias: {ZERO}"),
        (single(Keyed), SORTED, "float32", f"body.key.bias: {ZERO}"),
        (single(Spanning), SORTED, "float32", "the model does not run in float64 (NotImplemented"),
    ],
)
def test_noise_raises_no_alarm_in_gradients_that_are_small_or_zero_on_paper(
    model, cut, dtype, note
):
    report = Bench(cut, torch.float32, model=model).verified(whole_fits=cut is SORTED)
    assert (report.exact, report.dtype) == (True, dtype), report.worst
    assert report.max_relative_error <= report.limit
    if dtype == "float64":
        assert report.limit == 1e-10
        assert report.max_relative_error <= EXACT[torch.float64]
    else:
        assert report.limit == 1e-4
    assert any(each.startswith(note or "") for each in report.notes) == (note is not None)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (Spanning, Faulty("branches.3.weight", 1e-6)),
        (Keyed, Faulty("key.bias", offset=1e-8)),
    ],
)
def test_a_millionth_of_a_fault_shows_in_a_gradient_that_is_a_millionth_of_the_largest(
    model, fault
):
    report = Bench(SORTED, torch.float64, model=model, strategy=fault).verified()
    assert (report.exact, report.dtype) == (False, "float64")
    assert [name for name, _ in report.culprits] == ["accum.gradient"]
    (worst, error), (_, next_error) = report.worst[:2]
    assert worst == fault.name
    assert report.limit < error == report.max_relative_error < 1.0
    if model is Spanning:
        assert error == pytest.approx((report.micro_batches - 1) * 1e-6, rel=1e-6)
        assert next_error <= EXACT[torch.float64]


def test_the_reported_error_is_the_largest_difference_over_the_largest_reference():
    expected = {"large": torch.tensor([3.0, -1.0]), "small": torch.tensor([2e-6, -4e-6])}
    found = expected | {"small": torch.tensor([2e-6, -3e-6])}
    errors = compared(found, expected, torch.float64)
    assert errors.by_name == {"large": 0.0, "small": pytest.approx(0.25)}
    found["large"] = torch.tensor([3.0, float("nan")])
    errors = compared(found, expected, torch.float64)
    assert errors.by_name["large"] == float("inf")
    assert not errors.is_exact


@pytest.mark.parametrize(
    ("dtype", "size", "change", "is_exact"),
    [
        (torch.float64, 5e-17, 1e-16, True),
        (torch.float64, 5e-13, 1e-12, False),
        (torch.float64, 5e-15, 2.5e-12, False),  # a gradient of nothing becomes one of a little
        (torch.float64, 5e-11, 1e-15, True),
        (torch.float32, 5e-9, 1e-8, True),
        (torch.float32, 5e-3, 2e-6, False),  # 4e-4 of a gradient that is no rounding
        (torch.float32, 5e-9, 1e-5, False),
    ],
)
def test_a_change_of_a_few_last_bits_of_the_largest_gradient_is_rounding(
    dtype, size, change, is_exact
):
    # As that of the bias of a softmax over classes, which is zero on paper.
    expected = {"weight": torch.tensor([0.05], dtype=dtype)}
    expected["bias"] = torch.tensor([size], dtype=dtype)
    found = expected | {"bias": expected["bias"] - change}
    assert compared(found, expected, dtype).is_exact == is_exact


@pytest.mark.parametrize(
    ("model", "dtype"), [(Amplifying, "float64"), (single(lambda: Amplifying(2e4)), "float32")]
)
def test_a_model_that_amplifies_rounding_proves_nothing_and_no_module_is_blamed(model, dtype):
    report = Bench(SORTED, torch.float32, model=model).verified()
    assert (report.verdict, report.dtype) == ("not_proven", dtype)
    [(name, reason)] = report.culprits
    assert name == "rounding"
    assert "look for large numbers that cancel" in reason


# Memory


def cramped(limit: int) -> Bench:
    strategy = Cramped(limit=limit)
    return Bench(Fixed(micro=4), torch.float32, global_batch=4, strategy=strategy)


def test_memory_that_runs_out_in_float64_cuts_finer_and_never_falls_back_to_float32():
    report = cramped(80_000).verified()
    assert (report.exact, report.dtype, report.micro_batches) == (True, "float64", 2)
    assert report.reference == "sample by sample, summed"
    assert report.notes == (
        "cut into 2 micro-batches instead of the run's 1, which do not fit into memory in float64",
        "the whole batch in one piece ran out of memory in float64",
    )


def test_what_does_not_fit_in_float64_and_cannot_be_cut_ends_with_its_name():
    words = r"sample \d+ of \d+ tokens .* in float64, even alone"
    with pytest.raises(DoesNotFitError, match=words):
        cramped(20_000).verified()


# State, and what is not copied


class Patched(TinyLM):
    """Has its forward exchanged, or a hook, for a function that holds the model."""

    def __init__(self, at: str, couples: bool) -> None:
        super().__init__()

        def out(logits: Tensor) -> Tensor:
            return logits - couples * logits.mean() * self.head.bias.exp()

        if at == "model":
            whole = self.forward
            self.forward = lambda input_ids: out(whole(input_ids))  # type: ignore[method-assign]
        else:
            self.head.register_forward_hook(lambda _module, _taken, given: out(given))


@pytest.mark.parametrize(("at", "couples"), [("model", True), ("hook", True), ("hook", False)])
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
    assert (name, "nothing is proven" in reason) == ("head.weight", True)
