"""Compute the micro-batches of this rank, and agree over all ranks on what came out.

No collective runs while micro-batches compute, so a rank may run out of memory. One small vector
then tells all ranks who failed, the loss, and which parameters have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import Divisors, sum_of
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, fatal, release_memory
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.kit import Kit

AT_BEGINNING = "where the step begins: lower accum.max_tokens or accum.micro"


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """What one rank's micro-batches gave.

    Attributes:
        share: of the step's loss; None when an allocation failed.
        used: which parameters have a gradient.
        moved: which of the model state forwards wrote.
        metrics: sums by name over its micro-batches, of what the objective gave.
    """

    share: Tensor | None
    used: Sequence[bool]
    moved: Sequence[bool]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Agreed:
    """What the micro-batches of all ranks gave.

    Attributes:
        has_failed: whether an allocation did, on any rank.
        loss: of the step.
        used: which parameters have a gradient on any rank.
        moved: which of the model state forwards wrote on any rank.
        metrics: of the step by name, 0-d.
    """

    has_failed: bool
    loss: Tensor
    used: Sequence[bool]
    moved: Sequence[bool]
    metrics: Mapping[str, Tensor]


def gather(kit: Kit, step: int) -> None:
    """Bring the parameters of the window to this rank. Collective.

    Raises:
        DoesNotFitError: they do not fit.
    """
    kit.world.note("gather", step=step)
    with fatal(AT_BEGINNING):
        kit.sync.gather(kit.model)


def compute(kit: Kit, batch: PlannedBatch, parts: Sequence[Divisors], feed: Feed) -> Attempt:
    """Run every micro-batch of this rank, and make room for the reduction.

    Raises:
        ConfigError: the strategy returns no 0-d tensor.
        DoesNotFitError: memory ran out, and other ranks wait in a collective of the micro-batch.
    """
    kit.world.note("compute")
    micro_batches = batch.micro_batches
    with AllocationGuard():
        kit.model_state.watch()
        share = kit.strategy.backward(kit.model, kit.objective, micro_batches, parts, kit.sync)
        given: object = share  # whatever a strategy of the user's own returns
        if not isinstance(given, Tensor) or given.ndim:
            raise ConfigError(
                f"accum.gradient: backward of {type(kit.strategy).__name__} returned a "
                f"{type(given).__name__}; return this rank's share of the step's loss, a 0-d tensor"
            )
        kit.model_state.refuse_late()
        used, moved = kit.model.used(), kit.model_state.moved()
        kit.model.make_room()
        found = {
            name: sum_of([m.metrics[name] for m in micro_batches if name in m.metrics])
            for name in {name for m in micro_batches for name in m.metrics}
        }
        return Attempt(share.detach(), used, moved, found)
    if kit.sync.lockstep and kit.world.size > 1:
        smaller = feed.smaller_setting(batch) or "activation_checkpointing=true"
        raise DoesNotFitError(
            f"step {batch.step}: out of memory, and sync={kit.sync.name} reduces in every "
            f"micro-batch, so the step cannot be repeated: type {smaller}, or sync=deferred"
        )
    kit.model.drop_gradients()
    release_memory()
    nothing = [False] * len(kit.model.parameters), kit.model_state.unmoved()
    return Attempt(None, *nothing)


def agree(kit: Kit, mine: Attempt, weights: Divisors) -> Agreed:
    """Tell all ranks what came out. Collective: one small vector.

    Args:
        kit: of the step.
        mine: what this rank's micro-batches gave.
        weights: of every name over the whole global batch; metrics are divided by theirs.
    """
    world, share, names = kit.world, mine.share, kit.metrics
    world.note("agree")
    if world.size == 1:
        loss = torch.zeros(()) if share is None else share
        means = {n: mine.metrics[n] / (weights[n] or nan) for n in names if n in mine.metrics}
        return Agreed(share is None, loss, mine.used, mine.moved, means)
    # A rank without micro-batches does not know which metrics the others were given.
    flags = [*mine.used, *mine.moved, *(n in mine.metrics for n in names)]
    numbers = [float(share is None), 0.0, *(0.0 for _ in names), *map(float, flags)]
    vector = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    for place, number in enumerate((share, *map(mine.metrics.get, names)), start=1):
        if number is not None:
            vector[place] = number
    failures, *_ = given = world.sum(vector).tolist()
    counts = iter([ranks > 0 for ranks in given[2 + len(names) :]])
    used, moved = [next(counts) for _ in mine.used], [next(counts) for _ in mine.moved]
    means = {
        name: vector[2 + place] / (weights[name] or nan)
        for place, name in enumerate(names)
        if next(counts)
    }
    return Agreed(failures > 0, vector[1], used, moved, means)


def reduce(kit: Kit, agreed: Agreed) -> None:
    """Leave the step's gradient, summed over ranks, and rank 0's model state on all. Collective.

    Raises:
        ConfigError: no parameter has a gradient.
        DoesNotFitError: memory ran out, too late for a replay.
    """
    if not any(agreed.used):
        raise ConfigError(
            f"accum.gradient: backward of {type(kit.strategy).__name__} left no gradient: call "
            ".backward() on the divided sums of every micro-batch, within sync.micro_batch; the "
            "sums must depend on the model's parameters"
        )
    kit.world.note("reduce")
    with fatal(
        "in the reduction, after the ranks had agreed that their micro-batches succeeded, which "
        "cannot be repeated: lower accum.max_tokens or accum.micro"
    ):
        kit.sync.reduce(kit.model, agreed.used)
        kit.model_state.copy_from_main(agreed.moved)


def check_names(kit: Kit, micro_batches: Sequence[MicroBatch]) -> None:
    """Compare the names that the objective weighs with those of the first sample it weighed.

    Raises:
        ConfigError: a micro-batch has others.
    """
    for names in (m.weights.keys() for m in micro_batches):
        if names != set(kit.terms):
            raise ConfigError(
                f"objective: weights of {type(kit.objective).__name__} gives {', '.join(names)} "
                f"for one micro-batch and {', '.join(kit.terms)} for another: give every name "
                "each time, 0 where it has nothing to count"
            )
