"""Compare what ranks reduce with the gradient of the same samples in one process.

Real ranks compute a few samples of the step on the user's model, in its layout and under its sync
policy. A projection on a fixed random vector stands for the whole gradient: what is lost, counted
twice or averaged moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from trainer.accumulate.base import divisors
from trainer.core.errors import TrainError
from trainer.core.micro_batch import MicroBatch
from trainer.core.tensors import as_real, whole_of
from trainer.core.world import World, rng_key
from trainer.objectives.base import ModelCall
from trainer.parallel.base import Parallel
from trainer.plan.cut import IntArray
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext, StepState
from trainer.verify.case import Case, copied, walk
from trainer.verify.comparison import EXACT, Gradient
from trainer.verify.find_module import NamedReasons, examine

# Samples, or groups of them, that are taken of a step, two in a micro-batch
UNITS = 12

LayOutCall = Callable[[nn.Module, ModelCall], Parallel]
"""Lays a module, and a call of it, out over the ranks as the run does."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedError:
    """How far the projection of what ranks reduced is from that of one process."""

    error: float  # relative to the 2-norm of the gradient
    dtype: torch.dtype
    num_samples: int
    num_micro_batches: int
    culprits: NamedReasons = field(default_factory=NamedReasons)  # where these are looked for

    @property
    def is_exact(self) -> bool:
        """Whether it is rounding."""
        return self.error <= EXACT[self.dtype]


def compare_reduced(
    context: StepContext,
    batch: PlannedBatch,
    feed: Feed,
    lay_out: LayOutCall,
    world: World,
    *,
    in_one_piece: bool = False,
) -> ReducedError | None:
    """Compute a few samples of a step on one process and on all ranks. Collective.

    One process computes the micro-batches of the ranks, or all samples `in_one_piece` and without
    random draws; then modules that depend on the cut are named.

    The run on one process, and the step's samples, are the same on every rank. None where the model
    runs in neither float64 nor float32, which a comparison in one process says better.
    """
    for dtype in (torch.float64, torch.float32):
        case = Case(context=copied(context, dtype), dtype=dtype, batch=batch, feed=feed)
        units = case.units()[:UNITS]
        pairs = [np.concatenate(units[i : i + 2]) for i in range(0, len(units), 2)]
        # Two passes of one pair: a single micro-batch would show nothing of adding up.
        if len(pairs) == 1:
            pairs *= 2
        # Under lockstep all ranks have as many.
        if context.model.setup.sync.lockstep:
            pairs = pairs[: len(pairs) // world.size * world.size]
        micro_batches = single = as_step(case, pairs)
        suspects = NamedReasons()
        try:
            if in_one_piece:
                case, around = examine(case)
                single, suspects = as_step(case, [np.concatenate(pairs)]), around.modules
            expected = case.gradient(single)
        except Exception as fault:  # a model that fixes its precision may raise anything
            if isinstance(fault, TrainError):
                raise
            continue
        mine = micro_batches[world.rank :: world.size]
        num_taken = len({*chain.from_iterable(each.positions for each in micro_batches)})
        found = _reduced(case, mine, lay_out, world, num_taken)
        norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
        error = (_project(found) - _project(expected)).abs() / norm.clamp(torch.finfo(dtype).tiny)
        return ReducedError(
            error=float(error.nan_to_num(nan=torch.inf)),
            dtype=dtype,
            num_samples=sum(len(m.ids) for m in micro_batches),
            num_micro_batches=len(micro_batches),
            culprits=suspects,
        )
    return None


def as_step(case: Case, groups: Sequence[IntArray]) -> list[MicroBatch]:
    """Load groups of samples as the micro-batches of a step of their own."""
    taken, micro_batches = np.unique(np.concatenate(groups)), list[MicroBatch]()
    for group in groups:
        positions = tuple(np.searchsorted(taken, group).tolist())
        micro_batches.append(replace(case.load(group), positions=positions))
    return micro_batches


def _reduced(
    case: Case, mine: Sequence[MicroBatch], lay_out: LayOutCall, world: World, num_samples: int
) -> Gradient:
    """Compute this rank's micro-batches, and reduce the gradient as a step does. Collective."""
    with case.running() as run:
        module, context = run.module, run.context
        parallel, cast = lay_out(module, context.model.call), [*map(run.cast, mine)]
        state = StepState.of(parallel, context.model.objective, world)
        context = replace(context, parallel=parallel, state=state, world=world)
        parts = divisors(context.model.normalizer, context.terms, cast, world)
        parallel.begin(context.model.setup.sync)
        walk(context, context.model.strategy, cast, parts, num_samples)
        counts = world.sum_numbers([*map(float, parallel.used())])
        parallel.make_room()
        parallel.reduce([count > 0 for count in counts])
        gradient = dict[str, Tensor]()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradient[name] = whole_of(parameter.grad).detach()
        return gradient


def _project(gradient: Gradient) -> Tensor:
    """Multiply a gradient by the random vector, which has its own piece for every name, 0-d."""
    total = torch.zeros((), dtype=torch.float64)
    for name, grad in gradient.items():
        draw = torch.Generator().manual_seed(rng_key(name))
        real = as_real(grad)
        total += real.double().flatten() @ torch.randn(real.numel(), generator=draw).double()
    return total
