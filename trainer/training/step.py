"""One optimizer step: gather | compute | agree | reduce, then clip and update.

Between gathering and reducing no collective runs, so a rank may run out of memory or meet a
value that is not finite; one small vector is agreed on, and only then do gradients meet. The
same global batch is replayed under smaller micro-batches, or the whole step is skipped, alike on
every rank.

Where the cut is a part of what is computed (a mean of means, BatchNorm's statistics), smaller
micro-batches would make another step. There the same ones are tried once more, since what failed
may have been another's memory or fragmentation, and then the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import nan
from typing import Generic, Protocol, Self, TypeVar, final

import torch
from torch import Tensor

from trainer.accumulate.base import Divisors, GradientStrategy, sum_of
from trainer.accumulate.model_state import Registered
from trainer.accumulate.normalizer import Kind, divisors
from trainer.accumulate.rollback import Snapshot
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, fatal, release_memory
from trainer.core.world import World
from trainer.models.statistics import batch_statistics
from trainer.objectives.base import Objective
from trainer.optim.schedules import Schedule, apply_factor
from trainer.parallel.base import Parallel
from trainer.parallel.sync import Exact, SyncPolicy

NO_LOSS_TERMS = "no loss terms"
NOT_FINITE = "not finite"


class StepBatch(Protocol):
    """One global batch, cut, with this rank's micro-batches at hand."""

    @property
    def step(self) -> int:
        """The step it belongs to, from 1."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]:
        """This rank's micro-batches."""

    def smaller(self) -> Self | None:
        """Cut the same global batch into smaller micro-batches; None at one sample each."""

    def smaller_setting(self) -> str | None:
        """Name a setting that cuts smaller than this; None at one sample each."""

    def largest_sample(self) -> tuple[int, int]:
        """Name the sample that needs most memory: its id and its length in tokens."""


Batch = TypeVar("Batch", bound=StepBatch)


@final
@dataclass(frozen=True, kw_only=True)
class Kit:
    """Everything a step needs, composed once.

    Attributes:
        terms: every name the objective weighs.
        lr: learning rate at factor 1, of parameters in no group of their own.
        base_lrs: that of each parameter group.
        clip_norm: largest 2-norm of the step's gradient; None leaves it as it is.
        retry_with: the setting of a sync policy that fits and can replay a step, where this one
            cannot.
    """

    model: Parallel
    objective: Objective
    terms: tuple[str, ...]
    strategy: GradientStrategy
    sync: SyncPolicy
    normalizer: Kind
    optimizer: torch.optim.Optimizer
    lr: float
    base_lrs: tuple[float, ...]
    schedule: Schedule
    total_steps: int
    clip_norm: float | None
    world: World
    retry_with: str | None = None

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """Those of `terms` that are no metrics."""
        return tuple(name for name in self.terms if name not in self.objective.metric_names)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The other ones."""
        return tuple(name for name in self.terms if name in self.objective.metric_names)

    @cached_property
    def snapshot(self) -> Snapshot:
        """The declared state that forwards move, as it was before the step."""
        return Snapshot(self.model.module, self.objective)

    @cached_property
    def registered(self) -> Registered:
        """What forwards move and checkpoints save, the same on all ranks after each step."""
        is_ordered = isinstance(self.sync, Exact)
        return Registered(self.model.module, self.world, is_ordered=is_ordered)


@final
@dataclass(frozen=True, kw_only=True)
class StepReport(Generic[Batch]):
    """What one step did.

    Attributes:
        batch: the global batch, as it was cut in the end.
        loss: of the whole global batch, as optimized; 0-d.
        grad_norm: before clipping; 0-d.
        lr: of parameters in no group of their own.
        skipped: why nothing was updated, or None.
        replays: how often memory ran out before the step succeeded.
        metrics: of the whole global batch by name, 0-d: those that the objective gave in training.
    """

    batch: Batch
    loss: Tensor
    grad_norm: Tensor
    lr: float
    skipped: str | None = None
    replays: int = 0
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def train_step(kit: Kit, batch: Batch) -> StepReport[Batch]:
    """Turn one global batch into one update of the weights. Collective.

    A step whose loss or gradient is not finite, or that holds no loss term, updates nothing: not
    the weights, the optimizer's moments or the buffers. It still counts, as does its learning
    rate, which is a pure function of the step.

    Raises:
        DoesNotFitError: even one sample per micro-batch runs out of memory.
    """
    kit.world.note("weigh", step=batch.step)
    factor = kit.schedule.factor(batch.step - 1, kit.total_steps)
    apply_factor(kit.optimizer, kit.base_lrs, factor)
    lr = kit.lr * factor
    with fatal("where the step begins: lower accum.max_tokens or accum.micro"):
        kit.snapshot.take()
    agreed, batch, replays = _accumulate(kit, batch)
    report = partial(StepReport[Batch], batch=batch, lr=lr, replays=replays)
    if agreed is None:
        nothing = torch.zeros((), device=kit.world.device)
        return report(loss=nothing, grad_norm=nothing, skipped=NO_LOSS_TERMS)
    loss = agreed.loss
    kit.world.note("update")
    norm = kit.model.gradient_norm()
    # The step's only host sync: an update must not be launched before its gradient is known good.
    if not bool(torch.isfinite(loss + norm)):
        kit.model.drop_gradients()
        kit.snapshot.restore()
        return report(loss=loss, grad_norm=norm, metrics=agreed.metrics, skipped=NOT_FINITE)
    if kit.clip_norm is not None:
        kit.model.scale_gradients(torch.clamp(kit.clip_norm / (norm + 1e-6), max=1.0))
    _update(kit)
    return report(loss=loss, grad_norm=norm, metrics=agreed.metrics)


def _update(kit: Kit) -> None:
    """Step the optimizer, once: what of an update was done cannot be told or undone.

    Raises:
        DoesNotFitError: it ran out of memory.
    """
    with fatal(
        f"in the update of {type(kit.optimizer).__name__}, which is never tried again, since a "
        "part of it may be done: lower accum.memory or accum.max_tokens, or shard the state with "
        "parallel=fsdp; the newest checkpoint stands"
    ):
        kit.optimizer.step()
    kit.optimizer.zero_grad(set_to_none=True)


def _accumulate(kit: Kit, batch: Batch) -> tuple[_Agreed | None, Batch, int]:
    """Leave the step's gradient in `.grad`, replaying while memory runs out anywhere.

    Returns:
        What the micro-batches gave, None when no loss has a weight; the batch as it was cut; the
        replays.

    Raises:
        ConfigError: the objective or the strategy does not do what it must.
        DoesNotFitError: even one sample per micro-batch runs out of memory.
    """
    replays, registered = 0, kit.registered  # as it is before any forward
    while True:
        _check_names(kit, batch.micro_batches)
        weights, parts = divisors(kit.normalizer, kit.terms, batch.micro_batches, kit.world)
        if not any(weights[name] for name in kit.losses):
            return None, batch, replays
        kit.world.note("gather", step=batch.step)
        with fatal("where the step begins: lower accum.max_tokens or accum.micro"):
            kit.sync.gather(kit.model)
        kit.world.note("compute")
        attempt = _compute(kit, batch, parts)
        kit.world.note("agree")
        agreed = _agree(kit, attempt, weights)
        if not agreed.has_failed:
            _check_gradient(kit, agreed)
            kit.world.note("reduce")
            with fatal(
                "in the reduction, after the ranks had agreed that their micro-batches succeeded, "
                "which cannot be repeated: lower accum.max_tokens or accum.micro"
            ):
                kit.sync.reduce(kit.model, agreed.used)
                registered.meet(agreed.moved)
            return agreed, batch, replays
        kit.model.drop_gradients()
        kit.snapshot.restore()
        release_memory()
        batch, replays = _next_try(kit, batch, replays), replays + 1


def _check_names(kit: Kit, micro_batches: Sequence[MicroBatch]) -> None:
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


def _check_gradient(kit: Kit, agreed: _Agreed) -> None:
    """Look for a gradient of any parameter.

    Raises:
        ConfigError: there is none, though a loss has a weight.
    """
    if not any(agreed.used):
        raise ConfigError(
            f"accum.gradient: backward of {type(kit.strategy).__name__} left no gradient: call "
            ".backward() on the divided sums of every micro-batch, within sync.micro_batch; the "
            "sums must depend on the model's parameters"
        )


def _check_share(strategy: GradientStrategy, share: object) -> None:
    """Look at what a strategy returns.

    Raises:
        ConfigError: it is no 0-d tensor.
    """
    if not isinstance(share, Tensor) or share.ndim:
        raise ConfigError(
            f"accum.gradient: backward of {type(strategy).__name__} returned a "
            f"{type(share).__name__}; return this rank's share of the step's loss, a 0-d tensor"
        )


def _next_try(kit: Kit, batch: Batch, replays: int) -> Batch:
    """Cut the same global batch smaller, or not, where the cut is a part of what is computed.

    Raises:
        DoesNotFitError: there is nothing left to try.
    """
    why = _bound_to_its_cut(kit)
    if why is not None:
        if not replays:
            return batch
        raise DoesNotFitError(
            f"step {batch.step}: out of memory twice, and {why}, so smaller pieces would be "
            "another step: lower accum.micro, or try activation_checkpointing=true"
        )
    finer = batch.smaller()
    if finer is None:
        sample, length = batch.largest_sample()
        raise DoesNotFitError(
            f"sample {sample} of {length} tokens does not fit into memory, even alone: "
            "shorten it (data.max_length), or try activation_checkpointing=true"
        )
    return finer


def _bound_to_its_cut(kit: Kit) -> str | None:
    """Say why the step would be another one under another cut; None where it would not."""
    if kit.normalizer == "micro_batches":
        return "a mean of means changes with the cut"
    name = batch_statistics(kit.model.module)
    return name and f"{name} is BatchNorm, which normalises within each micro-batch"


@final
@dataclass(frozen=True, slots=True)
class _Attempt:
    """What one rank's micro-batches gave.

    Attributes:
        share: of the step's loss; None when an allocation failed.
        used: which parameters have a gradient.
        moved: which of the registered state forwards moved.
        metrics: sums by name over its micro-batches, of what the objective gave.
    """

    share: Tensor | None
    used: Sequence[bool]
    moved: Sequence[bool]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the micro-batches of all ranks gave.

    Attributes:
        has_failed: whether an allocation did, on any rank.
        loss: of the step.
        used: which parameters have a gradient on any rank.
        moved: which of the registered state forwards moved on any rank.
        metrics: of the step by name, 0-d.
    """

    has_failed: bool
    loss: Tensor
    used: Sequence[bool]
    moved: Sequence[bool]
    metrics: Mapping[str, Tensor]


def _compute(kit: Kit, batch: StepBatch, parts: Sequence[Divisors]) -> _Attempt:
    """Run every micro-batch of this rank, and make room for the reduction.

    Raises:
        DoesNotFitError: memory ran out, and other ranks wait in a collective of the micro-batch.
    """
    micro_batches = batch.micro_batches
    with AllocationGuard():
        kit.registered.watch()
        share = kit.strategy.backward(kit.model, kit.objective, micro_batches, parts, kit.sync)
        _check_share(kit.strategy, share)
        kit.registered.refuse_late()
        used, moved = kit.model.used(), kit.registered.moved()
        kit.model.make_room()
        found = {
            name: sum_of([m.metrics[name] for m in micro_batches if name in m.metrics])
            for name in {name for m in micro_batches for name in m.metrics}
        }
        return _Attempt(share.detach(), used, moved, found)
    if kit.sync.lockstep and kit.world.size > 1:
        remedies = [batch.smaller_setting() or "activation_checkpointing=true", kit.retry_with]
        raise DoesNotFitError(
            f"step {batch.step}: out of memory, and sync={kit.sync.name} reduces in every "
            "micro-batch, so the step cannot be repeated: type "
            f"{', or '.join(filter(None, remedies))}"
        )
    kit.model.drop_gradients()
    release_memory()
    nothing = [False] * len(kit.model.parameters), kit.registered.unmoved()
    return _Attempt(None, *nothing)


def _agree(kit: Kit, mine: _Attempt, weights: Divisors) -> _Agreed:
    """Tell all ranks what came out. Collective: one small vector.

    Args:
        kit: of the step.
        mine: what this rank's micro-batches gave.
        weights: of every name over the whole global batch; metrics are divided by theirs.
    """
    world, share, names = kit.world, mine.share, kit.metrics
    if world.size == 1:
        loss = torch.zeros(()) if share is None else share
        means = {n: mine.metrics[n] / (weights[n] or nan) for n in names if n in mine.metrics}
        return _Agreed(share is None, loss, mine.used, mine.moved, means)
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
    return _Agreed(failures > 0, vector[1], used, moved, means)
