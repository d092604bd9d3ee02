"""What a comparison is made of: what counts as rounding, in which precision, on what copy."""

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
    """Gets a gradient wrong by a factor that grows with the micro-batches, or by a constant."""

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


class Spanning(TinyLM):
    """Branches whose gradients are 1, 1e-2, 1e-4 and 1e-6 of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.mix(self.embed(input_ids))
        logits = self.head(hidden)
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


class Single(Keyed):
    """Refuses float64."""

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.embed.weight.dtype != torch.float32:
            raise NotImplementedError("no kernel for Double")
        return super().forward(input_ids)


class Amplifying(TinyLM):
    """Loses digits on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((VOCABULARY,), 0.3))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        large = logits * (self.scale * 1e8)
        return logits + large - logits * (self.scale * (1e8 - 1.0))


# What is rounding, and what is not


@pytest.mark.parametrize(
    ("model", "dtype", "limit"), [(Keyed, "float64", 1e-10), (Single, "float32", 1e-4)]
)
def test_noise_raises_no_alarm_in_gradients_that_are_zero_on_paper(model, dtype, limit):
    report = Bench(SORTED, torch.float32, model=model).verified()
    assert (report.exact, report.dtype, report.limit) == (True, dtype, limit), report.worst
    *others, note = report.notes
    assert note.startswith("key.bias: differs by no more than the rounding of larger terms")
    assert len(others) == (model is Single)
    assert all(each.startswith("the model does not run in float64 (NotImpl") for each in others)


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


def test_a_gradient_that_is_no_number_on_one_side_is_infinitely_wrong():
    expected = {"weight": torch.tensor([3.0, -1.0])}
    errors = compared({"weight": torch.tensor([3.0, float("nan")])}, expected, torch.float64)
    assert errors.by_name == {"weight": float("inf")}
    assert not errors.is_exact


@pytest.mark.parametrize(
    ("dtype", "size", "change", "is_exact"),
    [
        (torch.float64, 5e-13, 1e-12, False),
        (torch.float64, 5e-15, 2.5e-12, False),  # a gradient of nothing becomes one of a little
        (torch.float64, 5e-11, 1e-15, True),
        (torch.float32, 5e-9, 1e-8, True),
        (torch.float32, 5e-3, 2e-6, False),  # 4e-4 of a gradient that is no rounding
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


def test_a_model_that_amplifies_rounding_proves_nothing_and_no_module_is_blamed():
    report = Bench(SORTED, torch.float32, model=Amplifying).verified()
    assert (report.verdict, report.dtype) == ("not_proven", "float64")
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
    words = r"sample \d+ of \d+ tokens .* in float64, even alone"
    with pytest.raises(DoesNotFitError, match=words):
        cramped(20_000).verified()


# What is not copied


class Patched(TinyLM):
    """Has its forward exchanged for a function that holds the model."""

    def __init__(self) -> None:
        super().__init__()
        whole = self.forward
        self.forward = lambda input_ids: 2 * whole(input_ids)  # type: ignore[method-assign]


def test_a_function_that_holds_the_model_itself_proves_nothing_and_is_named():
    report = Bench(SORTED, torch.float32, model=Patched).verified()
    assert report.verdict == "not_proven"
    assert "nothing is proven" in report.culprits[-1][1]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_proves_nothing_and_is_named(kind):
    def model() -> nn.Module:
        built = TinyLM(WIDTH)
        getattr(built.head.weight, kind)(lambda _: None)
        return built

    report = Bench(SORTED, model=model).verified()
    assert report.verdict == "not_proven"
    [(name, reason)] = report.culprits
    assert (name, "nothing is proven" in reason) == ("head.weight", True)
