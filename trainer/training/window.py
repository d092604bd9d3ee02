"""Compute the micro-batches of this rank of a step, and agree over all ranks on the outcome.

No collective runs while micro-batches compute, so a rank may run out of memory. A small vector of
the hosts then tells all ranks who failed, and which parameters have a gradient; one of the devices
adds the loss up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import Pass, Rows, StepDivisors, at_positions, divisors, summed
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.core.out_of_memory import AllocationGuard, no_replay, peak_bytes, release_memory
from trainer.training.batches import PlannedBatch
from trainer.training.context import Measured, StepContext

AT_BEGINNING = "where the step begins: set a smaller accum.micro=N"


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass gave: the micro-batches of this rank or, once agreed on, of all ranks."""

    loss: Tensor | None  # this rank's share, or the step's, 0-d; None where an allocation failed
    used: Sequence[bool]  # which parameters have a gradient
    # By name, 0-d: sums over this rank's micro-batches, or means over the step
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    # Of a pass before the last, `(global batch, ...)`: zeros but for this rank's samples
    rows: Rows = field(default_factory=dict)
    peak_bytes: int = 0  # the most memory that any of several ranks has had, once agreed on
    # What the last pass measured: sums over this rank's micro-batches, or over those of all ranks
    measured: Mapping[str, float | Tensor] = field(default_factory=dict)


def count(context: StepContext, batch: PlannedBatch) -> StepDivisors:
    """Count what the sums of a step are divided by, over all ranks. Collective."""
    for micro_batch in batch.micro_batches:
        if (names := micro_batch.weights.keys()) != set(context.terms):
            raise ConfigError(
                f"objective: `weights` of {type(context.model.objective).__name__} gives "
                f"{', '.join(names)} and then {', '.join(context.terms)}: give every name each "
                "time, 0 where none counts"
            )
    found = divisors(context.model.normalizer, context.terms, batch.micro_batches, context.world)
    if found.num_samples != batch.plan.num_samples:
        raise ConfigError(
            f"batch: step {batch.step} has {batch.plan.num_samples} samples by the plan of this "
            f"rank, and {found.num_samples} over all: `size` must give every rank the same"
        )
    return found


def compute(
    context: StepContext, batch: PlannedBatch, each: Pass, divisors: StepDivisors, rows: Rows
) -> Outcome:
    """Walk a pass over the micro-batches of this rank; the last makes room for the reduction."""
    context.world.note("compute")
    model, parallel, scale = context.model, context.parallel, context.loss_scale
    sync, is_last = model.setup.sync, each is model.strategy
    unused = [False] * len(parallel.parameters)
    measured = Measured()
    scaled = divisors if scale is None else divisors.over(scale.value)
    with AllocationGuard(context.on_out_of_memory and partial(context.on_out_of_memory, batch)):
        context.state.model_state.watch()
        with ExitStack() as around:
            # In lockstep a block's weights may leave once used, and their casts would stay.
            if not sync.lockstep:
                around.enter_context(context.state.casts.once(context.world.device.type))
            for measuring in context.measuring if is_last else ():
                around.enter_context(measuring(context, batch, divisors.each, measured))
            own = (parallel, model.objective, batch.micro_batches)
            found = each.walk(*own, scaled, rows, is_last=is_last)
        context.state.model_state.check()
        if not is_last:
            whole = at_positions(found.rows, batch.micro_batches, batch.plan.num_samples)
            return Outcome(found.loss, unused, rows=whole)
        used = parallel.used()
        parallel.make_room()
        assert found.loss is not None
        loss = found.loss if scale is None else found.loss / scale.value
        return Outcome(loss, used, found.metrics, measured=measured)
    joins = model.coupling.joins_ranks
    if (sync.lockstep or joins) and context.world.size > 1:
        who = "the model sums over ranks" if joins else f"sync={sync.name} reduces"
        raise DoesNotFitError(
            f"step {batch.step}: out of memory, and {who} in every micro-batch, so the step "
            f"cannot be repeated: {remedies(context, batch)}"
        )
    parallel.drop_gradients()
    release_memory()
    return Outcome(None, unused)


def exchange(context: StepContext, mine: Outcome) -> Rows:
    """Give every rank the rows of the whole global batch, once all have theirs. Collective.

    A pass that gave none, as one that looks alone, leaves an empty mapping.
    """
    # What forwards wrote is undone, so that the next pass begins, and draws, as this one did.
    context.state.snapshot.restore()
    context.world.note("reduce")
    with no_replay("between two passes: set a smaller accum.micro=N"):
        name = f"accum.gradient: {type(context.model.strategy).__name__}"
        return summed(mine.rows, context.world, name)


def agree(context: StepContext, mine: Outcome, divisors: StepDivisors) -> Outcome:
    """Tell all ranks what came out. Collective: a small vector of hosts, and one of devices.

    What decides on how the step goes on is known to the hosts, which need not wait for their
    devices; loss and metrics stay there. Metrics are divided by their weights over the whole global
    batch.
    """
    world, names = context.world, context.terms
    world.note("agree")
    if world.size > 1:
        # A rank without micro-batches does not know which metrics the others were given.
        flags = [*mine.used, *(n in mine.metrics for n in names)]
        given = [float(mine.loss is None), *map(float, flags), float(peak_bytes(world.device))]
        has_failed, *found, peak = world.max_numbers(given)
        if has_failed:
            return replace(mine, loss=None)
        counts = iter([flag > 0 for flag in found])
        used = [next(counts) for _ in mine.used]
        tensors = mine.loss, *map(mine.metrics.get, names), *mine.measured.values()
        numbers = torch.zeros(len(tensors), dtype=torch.float64, device=world.device)
        for place, number in enumerate(tensors):
            if number is not None:
                numbers[place] = number
        world.sum(numbers)
        sums = {name: numbers[1 + place] for place, name in enumerate(names) if next(counts)}
        measured = dict(zip(mine.measured, numbers[1 + len(names) :], strict=True))
        mine = Outcome(numbers[0], used, sums, mine.rows, int(peak), measured)
    weights = divisors.weights
    means = {n: mine.metrics[n] / (weights[n] or nan) for n in names if n in mine.metrics}
    return replace(mine, metrics=means)


def reduce(context: StepContext, agreed: Outcome) -> None:
    """Leave the step's gradient, summed over ranks, and rank 0's model state on all. Collective."""
    if not any(agreed.used):
        name = type(context.model.strategy).__name__
        raise ConfigError(
            f"accum.gradient: {name} left no gradient: call .backward() on the normalised loss of "
            "every micro-batch, in `micro_batch`"
        )
    context.world.note("reduce")
    with no_replay("in the reduction, which cannot be repeated: set a smaller accum.micro=N"):
        context.parallel.reduce(agreed.used)
        if context.loss_scale is not None:
            factor = torch.full((), 1 / context.loss_scale.value, device=context.world.device)
            context.parallel.scale_gradients(factor)
        context.state.model_state.copy_from_main()


def remedies(context: StepContext, batch: PlannedBatch) -> str:
    """Say what to type where a step in lockstep ran out of memory."""
    shared, (_, longest) = batch.plan.max_shared_positions, batch.largest_sample()
    cap = max(shared // 2, longest)
    remedy = "lower data.max_length"
    if context.model.coupling.fixes_cut:
        remedy = "lower accum.micro"
    elif cap < shared:
        remedy = f"type accum=budget accum.max_tokens={cap}"
    return remedy + ", or type sync=deferred" * (
        context.model.setup.deferred_fits and not context.model.coupling.joins_ranks
    )
