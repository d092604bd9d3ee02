"""Copy a run to scratch: the same step in another precision and in other groups of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.accumulate.base import (
    GradientStrategy,
    Rows,
    StepDivisors,
    WeightUnit,
    at_positions,
    divisors,
    reference_kind,
)
from trainer.accumulate.loss_scale import LossScale
from trainer.accumulate.sum import Sum
from trainer.core.declared_state import own_generators
from trainer.core.micro_batch import Fields, MicroBatch, to_device
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.models.duplicate import duplicate
from trainer.objectives.base import weights_of
from trainer.parallel.base import Replicated, trained_parameters
from trainer.plan.cut import IntArray
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext, StepState
from trainer.training.window import Outcome, exchange
from trainer.verify.comparison import Errors, Gradient, compared, is_finite

NARROWING: Mapping[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}

HALVES = ("exponential_", "normal_", "rand", "rand_like", "randn", "randn_like", "uniform_")
CONSTANTS = dict.fromkeys(HALVES, 0.5) | {"bernoulli": 1.0, "bernoulli_": 1.0}
"""What operators of PyTorch give in place of random numbers: dropout keeps everything."""


def _first(pool: Any, size: Any = None, **_: Any) -> Any:  # noqa: ANN401 - as NumPy has it
    values = np.asarray(pool)
    # A number stands for the integers below it.
    if values.ndim == 0:
        values = np.arange(pool)
    return values[0] if size is None else np.resize(values, size)


def _halves(size: Any = None) -> Any:  # noqa: ANN401 - as NumPy has it
    return np.float64(0.5) if size is None else np.full(size, 0.5)[()]


NUMPY_CONSTANTS = {
    "rand": lambda *shape: np.full(shape, 0.5)[()],
    "random": _halves,
    "choice": _first,
}
"""What functions of `np.random` give then, by name: SpecAugment masks the first spans."""

ORDER_SEED = 0
"""Of the order in which a reference takes the samples: the same for every verification."""


@final
class Widened(TorchFunctionMode):
    """Computes in float64 what code asks for in less, and notes the dtypes asked for.

    Models written for half precision cast to float32 by hand (norms, rotary angles, logits). One
    such cast would bury a comparison in float64 under rounding of 1e-7.
    """

    def __init__(self, undone: set[torch.dtype]) -> None:
        super().__init__()
        self._undone = undone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Call PyTorch with wider dtypes."""
        if func in NARROWING:
            self._undone.add(NARROWING[func])
            func = Tensor.double
        named = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._wide, args), **named)

    def _wide(self, value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.dtype) or not (value.is_floating_point or value.is_complex):
            return value
        self._undone.add(value)
        return torch.complex128 if value.is_complex else torch.float64


@final
class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Makes random numbers constant in training mode; rare draws (`multinomial`) stay random."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run one operator, below autograd."""
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        # On GPUs. Its backward still scales, as for every sample.
        if name == "native_dropout":
            return func(given["input"], given["p"], False)
        # Of fused attention, forward and backward.
        if "dropout_p" in given:
            return func(**given | {"dropout_p": 0.0})
        if name not in CONSTANTS or given.get("generator") is not None:
            return func(*args, **kwargs)
        options = {"dtype": kwargs.get("dtype"), "device": kwargs.get("device")}
        if name.endswith("_"):
            drawn = given["self"]
        elif "self" in given:
            drawn = torch.empty_like(given["self"], **options)
        else:
            drawn = torch.empty(given["size"], **options)
        return drawn.fill_(CONSTANTS[name])


@contextmanager
def _constant_draws() -> Iterator[None]:
    functions = vars(np.random)
    before = {name: functions[name] for name in NUMPY_CONSTANTS}
    functions.update(NUMPY_CONSTANTS)
    try:
        with ConstantDraws():  # type: ignore[no-untyped-call] # untyped in torch
            yield
    finally:
        functions.update(before)


def _in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert what has a precision; `nn.Module.to` would drop imaginary parts."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    if tensor.is_complex():
        dtype = dtype.to_complex()
    return tensor.to(dtype)


def copied(
    context: StepContext,
    dtype: torch.dtype | None,
    shared: Iterable[object] = (),
    precision: str = "fp32",
) -> StepContext:
    """Copy the model and the objective of a run, all but objects that are `shared`.

    Hooks on parameters are not copied, and a function that holds the model goes on holding it. A
    `dtype` of None leaves each tensor its own; `precision` is that of matrix products.
    """
    memo: dict[int, Any] = {id(it): it for it in shared}
    module, objective = duplicate(context.model.module, memo), context.model.objective
    with suppress(Exception):  # one that holds a lock, say, is shared
        objective = duplicate(objective, memo)
    module._apply(lambda tensor: _in_precision(tensor, dtype))  # type: ignore[no-untyped-call] # untyped in torch
    world = World(device=context.world.device)
    model = replace(context.model, module=module, objective=objective, precision=precision)
    parallel = Replicated(module, model.call, trained_parameters(module), world)
    state = StepState.of(parallel, objective, world)
    return replace(context, model=model, parallel=parallel, state=state, world=world)


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A copy of the run's model, and the samples of one planned step to compute with it."""

    context: StepContext  # the run's, around the copy, on this rank alone
    # Of the copy's parameters and fields; None leaves both as they are. In float64, hand-written
    # casts to fewer bits are undone.
    dtype: torch.dtype | None
    batch: PlannedBatch  # the planned step, of all ranks
    feed: Feed  # loads its samples anew, in other groups
    size: int = 0  # samples per group of the reference, once it is chosen
    # Whether every micro-batch draws the same numbers, where that is possible
    holds_draws: bool = False
    precision: str = "fp32"  # what every copy computes in, by the word of `precision`
    change: Callable[[nn.Module], object] | None = None  # done to every copy before it computes
    undone: set[torch.dtype] = field(default_factory=set)  # what hand-written casts asked for
    # Names of tensors in plain attributes of modules after a pass
    plain: set[str] = field(default_factory=set)

    @property
    def module(self) -> nn.Module:
        """The copy."""
        return self.context.model.module

    @property
    def objective_name(self) -> str:
        """The objective, as a culprit."""
        return f"objective {type(self.context.model.objective).__name__}"

    @property
    def limit_dtype(self) -> torch.dtype:
        """The precision whose rounding is allowed."""
        return self.dtype or torch.float32

    @property
    def positions(self) -> IntArray:
        """Positions in the global batch, `(samples,)`, in the order of the plan."""
        return np.concatenate([*chain.from_iterable(self.batch.plan.ranks)])

    @property
    def num_samples(self) -> int:
        """Samples of the step."""
        return len(self.positions)

    @property
    def reference(self) -> str:
        """What the planned step is compared with, in words."""
        if self.size >= self.num_samples:
            return "whole batch"
        if self.size == 1:
            return "sample by sample, summed"
        return f"groups of {self.size}, summed"

    def units(self) -> list[IntArray]:
        """Positions of what no cut divides, in sample order: samples, or groups of one size.

        A short last group is left out, unless it is all there is.
        """
        positions, size = np.sort(self.positions), self.batch.plan.group_size
        whole = len(positions) // size
        if not whole:
            return [positions]
        return list(positions[: whole * size].reshape(whole, size))

    def load(self, positions: IntArray, *, pad_to: int | None = None) -> MicroBatch:
        """Load the samples at positions in the global batch as one micro-batch.

        `pad_to` is in tokens. A packed plan has documents end to end and takes none.
        """
        samples, plan = self.batch.samples, self.batch.plan
        lengths = plan.lengths[positions]
        ids = tuple(map(int, samples.ids[positions]))
        if plan.packed:
            length = num_positions = int(lengths.sum())
        else:
            length = pad_to or int(lengths.max())
            num_positions = length * len(ids)
        fields = self.feed.data.loader.load(Request(ids, samples.epoch, length, plan.packed))
        return MicroBatch(
            fields=fields,
            ids=ids,
            positions=tuple(positions.tolist()),
            weights=weights_of(self.context.model.objective, fields),
            num_tokens=int(lengths.sum()),
            num_positions=num_positions,
            # It draws as the step's first micro-batch does.
            rng_key=self.batch.micro_batches[0].rng_key,
        )

    def expected(self) -> Gradient:
        """Compute the reference: the whole step in groups of `size`, the last maybe smaller.

        The samples are shuffled: in the order of the plan a loss that couples neighbours couples
        the same ones as the micro-batches do, and would be exact by accident.
        """
        units, positions = self.units(), np.sort(self.positions)
        order = np.random.default_rng(ORDER_SEED).permutation(len(units))
        mixed = np.concatenate([units[i] for i in order])
        # What must stay together does, and a short last group stays last.
        mixed = np.concatenate([mixed, positions[len(mixed) :]])
        groups = np.split(mixed, range(self.size, len(mixed), self.size))
        # A whole batch in one piece needs no second pass.
        strategy: GradientStrategy | None = None
        if self.context.model.objective.coupling.kind == "batch" and len(groups) == 1:
            strategy = Sum()
        kind = reference_kind(self.context.model.normalizer)
        return self.gradient([*map(self.load, groups)], kind, strategy)

    def errors(self, found: Gradient, expected: Gradient) -> Errors:
        """Compare two gradients by the precision of this case."""
        return compared(found, expected, self.limit_dtype)

    @contextmanager
    def running(self) -> Iterator[Case]:
        """Lend a copy to compute with, in its precision: what a forward moves goes with it."""
        # Generators of the model's own are shared: no seed governs them, and that is to show.
        shared = own_generators(self.module, self.context.model.objective)
        context = copied(self.context, self.dtype, shared, self.precision)
        if self.change is not None:
            self.change(context.model.module)
        default = torch.get_default_dtype()
        with ExitStack() as modes:
            # cuDNN's recurrent layers draw their dropout out of sight.
            modes.enter_context(torch.backends.cudnn.flags(enabled=False))
            if self.dtype == torch.float64:
                modes.enter_context(Widened(self.undone))
            if self.holds_draws:
                modes.enter_context(_constant_draws())
            # What a forward makes without a dtype is as wide as the rest.
            modes.callback(torch.set_default_dtype, default)
            if self.dtype == torch.float64:
                torch.set_default_dtype(torch.float64)
            yield replace(self, context=context)

    def cast(self, micro_batch: MicroBatch) -> MicroBatch:
        """Put a micro-batch onto the copy's device, in its precision."""
        fields: Fields = {n: _in_precision(f, self.dtype) for n, f in micro_batch.fields.items()}
        weights = weights_of(self.context.model.objective, fields)
        fields = to_device(fields, self.context.world.device)
        key = micro_batch.rng_key
        if self.holds_draws:
            key = self.batch.micro_batches[0].rng_key
        return replace(micro_batch, fields=fields, weights=weights, rng_key=key)

    def gradient(
        self,
        micro_batches: Sequence[MicroBatch] = (),
        kind: WeightUnit | None = None,
        strategy: GradientStrategy | None = None,
        *,
        with_buffers: bool = False,
    ) -> Gradient:
        """Compute the planned step's gradient on a copy, with one thing changed where it is given.

        Parameters that no micro-batch used are left out.
        """
        # Small gradients would be zeros in fp16, and large ones infinite.
        scale = LossScale(value=LossScale.value if self.precision == "fp16" else 1.0)
        while True:
            found = self._scaled_gradient(
                micro_batches, kind, strategy, scale.value, with_buffers=with_buffers
            )
            if scale.value == 1.0 or is_finite(found) or not scale.shrink():
                return found

    def _scaled_gradient(
        self,
        micro_batches: Sequence[MicroBatch],
        kind: WeightUnit | None,
        strategy: GradientStrategy | None,
        scale: float,
        *,
        with_buffers: bool,
    ) -> Gradient:
        """Compute a gradient through a loss times a scale, a power of two, which rounds nothing."""
        with self.running() as run:
            context, module = run.context, run.module
            cast = [*map(run.cast, micro_batches or self.batch.micro_batches)]
            num_samples = len(set(chain.from_iterable(m.positions for m in cast)))
            found = divisors(kind or context.model.normalizer, context.terms, cast, context.world)
            found = found.over(scale)
            walk(context, strategy or context.model.strategy, cast, found, num_samples)
            # Tensors that modules hold and have not registered, but for computed ones.
            for name, part in module.named_modules():
                for key, value in vars(part).items():
                    if isinstance(value, Tensor) and value.is_leaf:
                        self.plain.add(f"{name}.{key}".lstrip("."))
            gradient = dict[str, Tensor]()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    gradient[name] = parameter.grad.detach() / scale
            if with_buffers:
                # A flag becomes a number, whose distance to another can be measured.
                gradient |= {name: 1 * each for name, each in module.named_buffers()}
            return gradient


def walk(
    context: StepContext,
    strategy: GradientStrategy,
    micro_batches: Sequence[MicroBatch],
    divisors: StepDivisors,
    num_samples: int,
) -> None:
    """Run all passes of a step over this rank's share of its samples. Collective."""
    own = (context.parallel, context.model.objective, micro_batches)
    rows: Rows = {}
    context.state.snapshot.take()
    for each in strategy.passes:
        is_last = each is strategy
        found = each.walk(*own, divisors, rows, is_last=is_last)
        if not is_last:
            mine = at_positions(found.rows, micro_batches, num_samples)
            rows = exchange(context, Outcome(None, (), rows=mine))
