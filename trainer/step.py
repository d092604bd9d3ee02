"""One optimizer step: gather | compute | agree | reduce, then clip and update.

Between gathering and reducing no collective runs, so a rank may run out of memory or meet a
value that is not finite; one small vector is agreed on, and only then do gradients meet. The
same global batch is replayed under smaller micro-batches, or the whole step is skipped, alike on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, final

import torch
from torch import Tensor

from trainer.accumulate.base import Divisors, GradientStrategy
from trainer.accumulate.normalizer import Kind, divisors
from trainer.errors import DoesNotFitError
from trainer.micro_batch import MicroBatch
from trainer.objectives.base import Objective
from trainer.out_of_memory import AllocationGuard
from trainer.parallel import Parallel
from trainer.scheduler import Schedule, apply_factor
from trainer.sync import SyncPolicy
from trainer.world import World

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
    """

    batch: Batch
    loss: Tensor
    grad_norm: Tensor
    lr: float
    skipped: str | None = None
    replays: int = 0


def train_step(kit: Kit, batch: Batch) -> StepReport[Batch]:
    """Turn one global batch into one update of the weights. Collective.

    A step whose loss or gradient is not finite, or that holds no loss term, updates nothing: not
    the weights, the optimizer's moments or the buffers. It still counts, as does its learning
    rate, which is a pure function of the step.

    Raises:
        DoesNotFitError: even one sample per micro-batch runs out of memory.
    """
    kit.world.note("agree", step=batch.step)
    factor = kit.schedule.factor(batch.step - 1, kit.total_steps)
    apply_factor(kit.optimizer, kit.base_lrs, factor)
    lr = kit.lr * factor
    buffers = [buffer.clone() for buffer in kit.model.module.buffers()]
    loss, batch, replays = _accumulate(kit, batch, buffers)
    if loss is None:
        nothing = torch.zeros((), device=kit.world.device)
        return StepReport(
            batch=batch, loss=nothing, grad_norm=nothing, lr=lr, skipped=NO_LOSS_TERMS
        )
    norm = kit.model.gradient_norm()
    # The step's only host sync: an update must not be launched before its gradient is known good.
    if not bool(torch.isfinite(loss + norm)):
        _undo(kit.model, buffers)
        return StepReport(
            batch=batch, loss=loss, grad_norm=norm, lr=lr, skipped=NOT_FINITE, replays=replays
        )
    kit.world.note("update")
    if kit.clip_norm is not None:
        kit.model.scale_gradients(torch.clamp(kit.clip_norm / (norm + 1e-6), max=1.0))
    _update(kit)
    return StepReport(batch=batch, loss=loss, grad_norm=norm, lr=lr, replays=replays)


def _update(kit: Kit) -> None:
    """Step the optimizer, once: what of an update was done cannot be told or undone.

    Raises:
        DoesNotFitError: it ran out of memory.
    """
    with AllocationGuard() as guard:
        kit.optimizer.step()
    if guard.failed:
        raise DoesNotFitError(
            f"out of memory in the update of {type(kit.optimizer).__name__}, which is never tried "
            "again, since a part of it may be done: lower accum.memory or accum.max_tokens, or "
            "shard the state with parallel=fsdp; the newest checkpoint stands"
        )
    kit.optimizer.zero_grad(set_to_none=True)


def _accumulate(
    kit: Kit, batch: Batch, buffers: Sequence[Tensor]
) -> tuple[Tensor | None, Batch, int]:
    """Leave the step's gradient in `.grad`, replaying while memory runs out anywhere.

    Raises:
        DoesNotFitError: even one sample per micro-batch runs out of memory.
    """
    replays = 0
    while True:
        weight, parts = divisors(kit.normalizer, kit.terms, batch.micro_batches, kit.world)
        if not weight:
            return None, batch, replays
        kit.world.note("gather", step=batch.step)
        kit.sync.gather(kit.model)
        kit.world.note("compute")
        share = _compute(kit, batch.micro_batches, parts)
        if share is None and kit.sync.lockstep and kit.world.size > 1:
            # The others wait inside of a collective that this rank cannot finish.
            raise DoesNotFitError(
                f"out of memory in a micro-batch that reduces its own gradient "
                f"(sync={kit.sync.name}): lower accum.max_tokens or accum.micro, or use "
                "sync=deferred, which tries again by itself"
            )
        kit.world.note("agree")
        failed, loss, used = _agree(kit, share)
        if not failed:
            kit.world.note("reduce")
            kit.sync.reduce(kit.model, used)
            return loss, batch, replays
        _undo(kit.model, buffers)
        if kit.normalizer == "micro_batches":
            raise DoesNotFitError(
                f"step {batch.step}: out of memory, and a mean of means changes with the cut, so "
                "smaller pieces would be another step: lower accum.micro"
            )
        finer = batch.smaller()
        if finer is None:
            sample, length = batch.largest_sample()
            raise DoesNotFitError(
                f"sample {sample} of {length} tokens does not fit into memory, even alone: "
                "shorten it (data.max_length), or try activation_checkpointing=true"
            )
        batch, replays = finer, replays + 1


def _compute(
    kit: Kit, micro_batches: Sequence[MicroBatch], parts: Sequence[Divisors]
) -> Tensor | None:
    """Run every micro-batch of this rank; None when an allocation failed."""
    with AllocationGuard():
        return kit.strategy.backward(kit.model, kit.objective, micro_batches, parts, kit.sync)
    return None


def _agree(kit: Kit, share: Tensor | None) -> tuple[bool, Tensor, Sequence[bool]]:
    """Tell all ranks whether any failed, the step's loss, and which parameters any of them used.

    Collective: one small vector.
    """
    used, world = kit.model.used(), kit.world
    if world.size == 1:
        return share is None, torch.zeros(()) if share is None else share, used
    mine = torch.tensor(
        [float(share is None), 0.0, *map(float, used)], dtype=torch.float64, device=world.device
    )
    if share is not None:
        mine[1] = share
    failures, _, *flags = world.sum(mine).tolist()
    return failures > 0, mine[1], [flag > 0 for flag in flags]


def _undo(model: Parallel, buffers: Sequence[Tensor]) -> None:
    """Put back what the micro-batches of a step changed."""
    model.drop_gradients()
    for buffer, saved in zip(model.module.buffers(), buffers, strict=True):
        buffer.copy_(saved)
