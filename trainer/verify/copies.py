"""Copy a run to scratch: the same step in another precision and in other groups of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.accumulate.normalizer import Kind, divisors
from trainer.accumulate.rollback import own_generators
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.models.bind import bind
from trainer.models.duplicate import duplicate
from trainer.objectives.base import Objective, weights_of
from trainer.parallel.base import Replicated
from trainer.plan.cut import IntArray
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.kit import Kit

Gradient = Mapping[str, Tensor]
"""A step's gradient by parameter name; what no micro-batch uses is left out."""

NARROWING = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}

ORDER_SEED = 0
"""Of the order in which a reference takes the samples: the same for every verification."""


@final
class Widened(TorchFunctionMode):
    """Computes in float64 what code asks to be computed in less.

    Models written for half precision cast to float32 by hand (norms, rotary angles, logits). One
    such cast would bury a comparison in float64 under rounding of 1e-7.

    Args:
        undone: gets the dtypes that were asked for.
    """

    def __init__(self, undone: set[torch.dtype]) -> None:
        super().__init__()
        self._undone = undone

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        """Call a function of PyTorch with wider dtypes."""
        if func in NARROWING:
            self._undone.add(NARROWING[func])
            func = Tensor.double
        named = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._wide, args), **named)

    def _wide(self, value: Any) -> Any:  # noqa: ANN401 - an argument of anything
        if not isinstance(value, torch.dtype) or not (value.is_floating_point or value.is_complex):
            return value
        self._undone.add(value)
        return _matching(torch.float64, value)


def _matching(dtype: torch.dtype, of: torch.dtype) -> torch.dtype:
    """Give a precision to real and to complex numbers."""
    return dtype.to_complex() if of.is_complex else dtype


def _in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert what has a precision; `nn.Module.to` would drop imaginary parts."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(_matching(dtype, tensor.dtype))


def _plain(module: nn.Module) -> set[str]:
    """Name the tensors that modules hold and have not registered, but for computed ones."""
    return {
        f"{name}.{key}".lstrip(".")
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Tensor) and value.is_leaf
    }


@final
@dataclass(frozen=True, kw_only=True)
class Scratch:
    """A copy of the run's model, with everything a step needs around it.

    Attributes:
        kit: the run's, around the copy, on this rank alone.
        dtype: of the copy's parameters and fields; None leaves both as they are. In float64,
            hand-written casts to fewer bits are undone.
        undone: what they asked for.
        plain: tensors that were found in plain attributes of modules after a pass.
    """

    kit: Kit
    dtype: torch.dtype | None
    undone: set[torch.dtype] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, kit: Kit, dtype: torch.dtype | None, shared: Iterable[object] = ()) -> Scratch:
        """Copy the model and the objective of a run, in another precision where one is given.

        Hooks on parameters are not copied, and functions that hold the model go on holding it:
        what these reach is compared with nothing, and named.

        Args:
            kit: of the run, or of a copy.
            dtype: of the copy's parameters and fields.
            shared: objects that the copy holds too.
        """
        memo: dict[int, Any] = {id(it): it for it in shared}
        module, objective = duplicate(kit.model.module, memo), kit.objective
        with suppress(Exception):  # one that holds a lock, say, is shared
            objective = duplicate(objective, memo)
        module._apply(lambda tensor: _in_precision(tensor, dtype))  # type: ignore[no-untyped-call] # untyped in torch
        parameters = [p for p in module.parameters() if p.requires_grad]
        world = World(device=kit.world.device)
        model = Replicated(module, bind(module), parameters, world)
        return cls(kit=replace(kit, model=model, objective=objective, world=world), dtype=dtype)

    @property
    def module(self) -> nn.Module:
        """The copy."""
        return self.kit.model.module

    @contextmanager
    def running(self) -> Iterator[Scratch]:
        """Lend a copy to compute with, in its precision: what a forward moves goes with it.

        Random generators of the model's own are shared: in a run no seed governs them, and that is
        to show.

        Yields:
            The copy.
        """
        run = Scratch.of(self.kit, self.dtype, own_generators(self.module, self.kit.objective))
        default = torch.get_default_dtype()
        try:
            with ExitStack() as stack:
                # cuDNN has no backward for recurrent layers out of training mode, into which
                # those that draw dropout are put.
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
                if self.dtype == torch.float64:
                    torch.set_default_dtype(torch.float64)
                    stack.enter_context(Widened(self.undone))
                yield run
        finally:
            torch.set_default_dtype(default)

    def gradient(self, micro_batches: Sequence[MicroBatch], kind: Kind) -> Gradient:
        """Compute one step's gradient from these micro-batches.

        Args:
            micro_batches: the whole step.
            kind: what its sums are divided by.
        """
        with self.running() as run:
            kit = run.kit
            cast = [self.cast(m) for m in micro_batches]
            _, parts = divisors(kind, kit.terms, cast, kit.world)
            kit.strategy.backward(kit.model, kit.objective, cast, parts, kit.sync)
            self.plain.update(_plain(run.module))
            named = run.module.named_parameters()
            return {name: p.grad.detach() for name, p in named if p.grad is not None}

    def cast(self, micro_batch: MicroBatch) -> MicroBatch:
        """Put a micro-batch onto the copy's device, in its precision."""
        fields = {n: _in_precision(f, self.dtype) for n, f in micro_batch.fields.items()}
        cast = replace(micro_batch, fields=fields, weights=weights_of(self.kit.objective, fields))
        return cast.to(self.kit.world.device)


@final
@dataclass(frozen=True)
class Groups:
    """The samples of a planned step, to be loaded again in other groups.

    Every group is drawn for under the key of the step's first micro-batch.
    """

    batch: PlannedBatch
    feed: Feed
    objective: Objective

    @property
    def positions(self) -> IntArray:
        """Positions in the global batch, `(samples,)`, in the order of the plan."""
        return np.concatenate([slot for rank in self.batch.plan.ranks for slot in rank])

    def lengths(self, positions: IntArray) -> IntArray:
        """Tokens of samples, in the shape of their positions."""
        return self.batch.plan.lengths[positions]

    def units(self) -> list[IntArray]:
        """Positions of what no cut divides, in sample order: samples, or groups of one size.

        A short last group is left out, unless it is all there is.
        """
        positions, size = np.sort(self.positions), self.batch.plan.group_size
        whole = len(positions) // size
        return list(positions[: whole * size].reshape(whole, size)) if whole else [positions]

    def group(self, positions: IntArray, *, pad_to: int | None = None) -> MicroBatch:
        """Load samples as one micro-batch.

        Args:
            positions: in the global batch.
            pad_to: length of the longest sample unless given; packed rows are not padded.
        """
        samples, plan = self.batch.samples, self.batch.plan
        lengths = self.lengths(positions)
        length = int(lengths.sum()) if plan.packed else pad_to or int(lengths.max())
        ids = tuple(map(int, samples.ids[positions]))
        fields = self.feed.loader.load(Request(ids, samples.epoch, length, plan.packed))
        return MicroBatch(
            fields=fields,
            ids=ids,
            weights=weights_of(self.objective, fields),
            num_tokens=int(lengths.sum()),
            num_positions=length if plan.packed else length * len(ids),
            rng_key=self.batch.micro_batches[0].rng_key,
        )

    @property
    def shuffled(self) -> IntArray:
        """Positions in an order of their own, `(samples,)`; what must stay together does.

        In the order of the plan, or of the samples, a loss that couples neighbours couples the
        same ones as the micro-batches do, and would be exact by accident.
        """
        units = self.units()
        order = np.random.default_rng(ORDER_SEED).permutation(len(units))
        mixed = np.concatenate([units[i] for i in order])
        # A short last group stays last.
        return np.concatenate([mixed, np.sort(self.positions)[len(mixed) :]])

    def groups(self, size: int) -> list[MicroBatch]:
        """Load the whole step, shuffled, in groups of `size` samples, the last maybe smaller."""
        positions = self.shuffled
        starts = range(0, len(positions), size)
        return [self.group(positions[start : start + size]) for start in starts]
