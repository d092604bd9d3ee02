"""Compose a step; compute the micro-batches of this rank, and agree over all ranks on the outcome.

No collective runs while micro-batches compute, so a rank may run out of memory. A small vector of
the hosts then tells all ranks who failed, and which parameters have a gradient; one of the devices
adds the loss up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import Divisors, GradientStrategy, sum_of
from trainer.accumulate.loss_scale import LossScale
from trainer.accumulate.model_state import ModelState
from trainer.accumulate.normalizer import Kind
from trainer.accumulate.rollback import Snapshot
from trainer.core.coupling import NONE, Coupling
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, no_replay, peak_bytes, release_memory
from trainer.core.stateful import Stateful
from trainer.core.world import World
from trainer.models.bind import Casts
from trainer.objectives.base import Objective
from trainer.optim.schedules import Schedule
from trainer.parallel.base import Parallel
from trainer.parallel.sync import SyncPolicy
from trainer.training.batches import PlannedBatch

AT_BEGINNING = "where the step begins: set a smaller accum.micro=N"


@final
@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Everything a step needs, composed once."""

    model: Parallel
    objective: Objective
    terms: tuple[str, ...]  # every name the objective weighs
    strategy: GradientStrategy
    sync: SyncPolicy
    deferred_fits: bool = True  # whether memory has room for the gradients of `sync=deferred`
    normalizer: Kind
    coupling: Coupling = NONE  # of the samples of a step, by model, objective and normalizer
    optimizer: torch.optim.Optimizer
    lr: float  # learning rate at factor 1, of parameters in no group of their own
    base_lrs: tuple[float, ...]  # that of each parameter group
    lr_scale: Callable[[int], float]  # what the size of a step, from 0, multiplies them by
    schedule: Schedule
    total_steps: int
    clip_norm: float | None  # largest 2-norm of the step's gradient; None leaves it as it is
    loss_scale: LossScale | None = None  # of a run in fp16
    parts: Sequence[Stateful] = ()  # those that follow every update, in order
    world: World
    # Called with the global batch and the error, before memory is freed
    on_out_of_memory: Callable[[PlannedBatch, BaseException], None] | None = None

    # Of the declared state that forwards write, as it was before the step
    snapshot: Snapshot = field(init=False)
    # What forwards write and checkpoints save, the same on all ranks after a step
    model_state: ModelState = field(init=False)
    # Of weights, which autocast keeps over the micro-batches of a step
    casts: Casts = field(init=False)

    def __post_init__(self) -> None:
        state = ModelState(self.model.module, self.world, is_ordered=self.model.is_ordered)
        object.__setattr__(self, "snapshot", Snapshot(self.model.module, self.objective))
        object.__setattr__(self, "model_state", state)
        object.__setattr__(self, "casts", Casts(self.model.module, by_value=True))

    @property
    def losses(self) -> list[str]:
        """Those of `terms` that are no metrics."""
        return [name for name in self.terms if name not in self.objective.metric_names]


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What micro-batches gave: those of this rank or, once agreed on, of all ranks."""

    loss: Tensor | None  # this rank's share, or the step's, 0-d; None where an allocation failed
    used: Sequence[bool]  # which parameters have a gradient
    moved: Sequence[bool]  # which of the model state forwards wrote
    # By name, 0-d: sums over this rank's micro-batches, or means over the step
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    peak_bytes: int = 0  # the most memory that any of several ranks has had, once agreed on


def gather(context: StepContext, step: int) -> None:
    """Bring the parameters of the window to this rank. Collective."""
    context.world.note("gather", step=step)
    with no_replay(AT_BEGINNING):
        context.model.begin(context.sync)


def compute(context: StepContext, batch: PlannedBatch, parts: Sequence[Divisors]) -> Outcome:
    """Run every micro-batch of this rank, and make room for the reduction.

    Raises:
        ConfigError: the strategy returns no 0-d tensor.
        DoesNotFitError: memory ran out, and other ranks wait in a collective of the micro-batch.
    """
    context.world.note("compute")
    model, device = context.model, context.world.device
    micro_batches, scale = batch.micro_batches, context.loss_scale
    parts = parts if scale is None else scale.scaled(parts)
    with AllocationGuard(context.on_out_of_memory and partial(context.on_out_of_memory, batch)):
        context.model_state.watch()
        # In lockstep a block's weights may leave once they are used, and their casts would stay.
        casts = nullcontext() if context.sync.lockstep else context.casts.once(device.type)
        with casts:
            share = context.strategy.backward(model, context.objective, micro_batches, parts)
        given: object = share  # whatever a strategy of the user's own returns
        if not isinstance(given, Tensor) or given.ndim:
            raise ConfigError(
                f"accum.gradient: backward of {type(context.strategy).__name__} returned a "
                f"{type(given).__name__}; return this rank's share of the step's loss, a 0-d tensor"
            )
        context.model_state.refuse_late()
        used, moved = model.used(), context.model_state.moved()
        model.make_room()
        found = {
            name: sum_of([m.metrics[name] for m in micro_batches if name in m.metrics])
            for name in {name for m in micro_batches for name in m.metrics}
        }
        share = share.detach() if scale is None else share.detach() / scale.value
        return Outcome(share, used, moved, found)
    if context.sync.lockstep and context.world.size > 1:
        raise DoesNotFitError(
            f"step {batch.step}: out of memory, and sync={context.sync.name} reduces in every "
            f"micro-batch, so the step cannot be repeated: {remedies(context, batch)}"
        )
    model.drop_gradients()
    release_memory()
    return Outcome(None, [False] * len(model.parameters), context.model_state.unmoved())


def agree(context: StepContext, mine: Outcome, weights: Divisors) -> Outcome:
    """Tell all ranks what came out. Collective: a small vector of hosts, and one of devices.

    What decides on how the step goes on is known to the hosts, which need not wait for their
    devices; loss and metrics stay there. Metrics are divided by their weights over the whole global
    batch.
    """
    world, names = context.world, context.terms
    world.note("agree")
    if world.size > 1:
        # A rank without micro-batches does not know which metrics the others were given.
        flags = [*mine.used, *mine.moved, *(n in mine.metrics for n in names)]
        peaks = [0] * world.size  # each rank's own
        peaks[world.rank] = peak_bytes(world.device)
        given = [float(mine.loss is None), *map(float, flags), *map(float, peaks)]
        failures, *ranks = world.sum_numbers(given)
        if failures:
            return replace(mine, loss=None)
        counts = iter([count > 0 for count in ranks])
        used, moved = [next(counts) for _ in mine.used], [next(counts) for _ in mine.moved]
        numbers = torch.zeros(1 + len(names), dtype=torch.float64, device=world.device)
        for place, number in enumerate((mine.loss, *map(mine.metrics.get, names))):
            if number is not None:
                numbers[place] = number
        world.sum(numbers)
        sums = {name: numbers[1 + place] for place, name in enumerate(names) if next(counts)}
        mine = Outcome(numbers[0], used, moved, sums, int(max(ranks[-world.size :])))
    means = {n: mine.metrics[n] / (weights[n] or nan) for n in names if n in mine.metrics}
    return replace(mine, metrics=means)


def reduce(context: StepContext, agreed: Outcome) -> None:
    """Leave the step's gradient, summed over ranks, and rank 0's model state on all. Collective.

    Raises:
        ConfigError: no parameter has a gradient.
        DoesNotFitError: memory ran out, too late for a replay.
    """
    if not any(agreed.used):
        raise ConfigError(
            f"accum.gradient: backward of {type(context.strategy).__name__} left no gradient: call "
            ".backward() on the normalised loss of every micro-batch, within model.micro_batch"
        )
    context.world.note("reduce")
    with no_replay("in the reduction, which cannot be repeated: set a smaller accum.micro=N"):
        context.model.reduce(agreed.used)
        if context.loss_scale is not None:
            factor = torch.full((), 1 / context.loss_scale.value, device=context.world.device)
            context.model.scale_gradients(factor)
        context.model_state.copy_from_main(agreed.moved)


def remedies(context: StepContext, batch: PlannedBatch) -> str:
    """Say what to type where a step in lockstep ran out of memory."""
    shared, (_, longest) = batch.plan.max_shared_positions, batch.largest_sample()
    cap = max(shared // 2, longest)
    remedy = (
        f"type accum=budget accum.max_tokens={cap}" if cap < shared else "lower data.max_length"
    )
    if context.coupling.fixes_cut:
        remedy = "lower accum.micro"
    return remedy + ", or type sync=deferred" * context.deferred_fits


def check_names(context: StepContext, micro_batches: Sequence[MicroBatch]) -> None:
    """Compare the names that the objective weighs with those of the first sample it weighed.

    Raises:
        ConfigError: a micro-batch has others.
    """
    for names in (m.weights.keys() for m in micro_batches):
        if names != set(context.terms):
            raise ConfigError(
                f"objective: `weights` of {type(context.objective).__name__} gives "
                f"{', '.join(names)} and then {', '.join(context.terms)}: give every name each "
                "time, 0 where none counts"
            )
