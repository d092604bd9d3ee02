"""Take one optimizer step: gather | compute | agree | reduce, then clip and update.

Between gathering and reducing no collective runs, so a rank may run out of memory or meet a value
that is not finite. The hosts agree on the outcome, and only then are gradients reduced; else the
same global batch is replayed in smaller micro-batches, or the step is skipped, on all ranks.

A gradient strategy of several passes computes and agrees in each, and after ranks have agreed on
one they exchange what it gave for the next.

Where the cut is a part of what is computed (`coupling.fixes_cut`: a mean of means, statistics over
a micro-batch), smaller micro-batches would make another step. There the same ones are tried once
more, since what failed may have been another's memory or fragmentation, and then the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import Rows, StepDivisors
from trainer.core.errors import DoesNotFitError
from trainer.core.out_of_memory import no_replay, release_memory
from trainer.core.stateful import StepGradient
from trainer.optim.schedules import apply_factor
from trainer.training import window
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext

NO_LOSS_TERMS = "no loss terms"
NOT_FINITE = "not finite"
LOSS_SCALE = "loss scale"


@final
@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did."""

    batch: PlannedBatch  # the global batch, as it was cut in the end
    # Of the whole global batch, as optimized; 0-d. None without a single loss term.
    loss: Tensor | None = None
    grad_norm: Tensor | None = None  # before clipping; 0-d. None likewise.
    lr: float  # of parameters in no group of their own
    skipped: str | None = None  # why nothing was updated, or None
    replays: int = 0  # how often memory ran out before the step succeeded
    # Of the whole global batch by name, 0-d: those that the objective gave in training
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    peak_bytes: int = 0  # the most memory that any rank had had when ranks agreed; 0 for one rank


def train_step(context: StepContext, batch: PlannedBatch, feed: Feed) -> StepReport:
    """Turn one global batch into one update of the weights. Collective.

    A step whose loss or gradient is not finite, or that holds no loss term, updates nothing: not
    the weights, the optimizer's moments or the buffers. It still counts, as does its learning rate,
    which is a pure function of the step. In fp16 the loss scale may be why; it is halved.

    Where memory runs out, the feed cuts this global batch, and all that follow, smaller.
    """
    context.world.note("normalizer", step=batch.step)
    data, model = context.data, context.model
    factor = model.schedule.factor(batch.step - 1, data.total_steps)
    scale = model.lr_scale(data.order, batch.samples.before)
    lr = model.spec.lr * scale * factor
    apply_factor(context.optimizer, [each * scale for each in context.base_lrs], factor)
    if context.follow_batch is not None:
        context.follow_batch(batch.samples.size, scale)
    with no_replay(window.AT_BEGINNING):
        context.state.snapshot.take()
    replays = 0
    while True:
        divisors = window.count(context, batch)
        if not any(divisors.weights[name] for name in context.losses):
            return StepReport(batch=batch, lr=lr, replays=replays, skipped=NO_LOSS_TERMS)
        context.world.note("gather", step=batch.step)
        with no_replay(window.AT_BEGINNING):
            context.parallel.begin(context.model.setup.sync)
        agreed = _compute_passes(context, batch, divisors)
        if agreed.loss is not None:
            break
        _roll_back(context)
        batch = _cut_for_replay(context, batch, feed, replays)
        replays += 1
    window.reduce(context, agreed)
    context.world.note("update")
    norm = context.parallel.gradient_norm()
    skipped: str | None = None
    # The step's only host sync: no update before its gradient is known to be good.
    if bool(torch.isfinite(agreed.loss + norm)):
        gradient = StepGradient(
            step=batch.step,
            norm=norm,
            num_samples=batch.plan.num_samples,
            num_tokens=batch.num_tokens,
            measured=agreed.measured,
        )
        _update(context, gradient)
    else:
        _roll_back(context)
        halved = context.loss_scale is not None and context.loss_scale.shrink()
        skipped = LOSS_SCALE if halved else NOT_FINITE
    return StepReport(
        batch=batch,
        loss=agreed.loss,
        grad_norm=norm,
        lr=lr,
        skipped=skipped,
        replays=replays,
        metrics=agreed.metrics,
        peak_bytes=agreed.peak_bytes,
    )


def _compute_passes(
    context: StepContext, batch: PlannedBatch, divisors: StepDivisors
) -> window.Outcome:
    """Compute and agree: once, but where a loss is over the whole batch. Collective.

    Gives what ranks agreed on in the last pass, or in the first that ran out of memory anywhere.
    """
    rows: Rows = {}
    for each in context.model.strategy.passes:
        mine = window.compute(context, batch, each, divisors, rows)
        agreed = window.agree(context, mine, divisors)
        if agreed.loss is None or each is context.model.strategy:
            break
        rows = window.exchange(context, agreed)
    return agreed


def _roll_back(context: StepContext) -> None:
    """Forget the gradients and what forwards wrote."""
    context.parallel.drop_gradients()
    context.state.snapshot.restore()


def _update(context: StepContext, gradient: StepGradient) -> None:
    """Clip and step, once: an update that failed half-way cannot be rolled back."""
    optimizer = context.optimizer
    for part in context.parts:
        part.see_gradient(gradient)
    with no_replay(
        f"in the update of {type(optimizer).__name__}, which may be half done: set a smaller "
        "accum.micro=N, or shard the state with parallel=fsdp"
    ):
        if context.model.clip_norm is not None:
            factor = context.model.clip_norm / (gradient.norm + 1e-6)
            context.parallel.scale_gradients(torch.clamp(factor, max=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for part in context.parts:
                part.after_update(gradient.step)


def _cut_for_replay(
    context: StepContext, batch: PlannedBatch, feed: Feed, replays: int
) -> PlannedBatch:
    """Cut the same global batch smaller, or not, where the cut is a part of what is computed."""
    release_memory()
    if (coupling := context.model.coupling).fixes_cut:
        if not replays:
            return batch
        raise DoesNotFitError(
            f"step {batch.step}: out of memory twice, and {coupling.why}, so it cannot go "
            "on with smaller micro-batches: begin with a lower accum.micro, or try "
            "activation_checkpointing=true"
        )
    finer = feed.smaller(batch)
    if finer is None:
        sample, length = batch.largest_sample()
        raise DoesNotFitError(
            f"sample {sample} of {length} tokens{feed.layout.group_note} does not fit into "
            "memory, even alone: shorten it (data.max_length), or try activation_checkpointing=true"
        )
    return finer
