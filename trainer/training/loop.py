"""The training loop: steps, evaluation, checkpoints, stop; micro-batches are of step.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from torch import Tensor

from trainer.config.rules import cadence_steps
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError, NonFiniteError, Preempted, TrainError
from trainer.core.format import named_means, plural
from trainer.core.out_of_memory import peak_bytes
from trainer.core.signals import ignore_further
from trainer.core.stateful import STEP_KEYS, State, Stateful
from trainer.report.reporter import Reporter
from trainer.training.batches import Feed
from trainer.training.checkpointing import Checkpointer
from trainer.training.evaluation import HeldOut, evaluate_parts
from trainer.training.model_flops import ModelFlops
from trainer.training.precise_statistics import precise_statistics
from trainer.training.step import NO_LOSS_TERMS, NOT_FINITE, StepReport, train_step
from trainer.training.window import StepContext


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, composed once."""

    config: RunConfig
    context: StepContext
    feed: Feed
    held_out: Mapping[str, HeldOut]  # by name; the run's own part has none
    reporter: Reporter
    checkpointer: Checkpointer  # saves checkpoints, and may add a cadence in seconds. Collective.
    was_asked: Callable[[], bool]  # whether a signal asked this rank to stop
    # Of the model; None on ranks that report nothing, and where they are not counted
    flops: ModelFlops | None
    progress: Progress


@final
@dataclass(kw_only=True)
class Progress(Stateful):
    """How far the loop has come."""

    step: int = 0  # optimizer steps taken, from the start of the run
    total_tokens: int = 0  # real input positions consumed, from the start of the run
    tokens: int = 0  # likewise, in this process
    seconds: float = 0.0  # spent on steps in this process; evaluation and saving do not count
    loss: Tensor | None = None  # of the last step, 0-d; None where it had no loss term
    # The last one's metrics by name, made at step `evaluated_at`
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    saved_at: int | None = None  # step of the newest checkpoint
    skipped_steps: int = 0  # steps without an update
    replays: int = 0  # times a step ran out of memory and was computed again
    failures: int = 0  # steps in a row, up to the last one, that were not finite
    taken: int = 0  # optimizer steps taken in this process
    # Whether a step had a loss term; taken for granted of steps of other processes
    has_terms: bool = False
    peak_bytes: int = 0  # the most memory that any rank has had in this process

    def __post_init__(self) -> None:
        """Take it for granted that steps before this process had a loss term."""
        self.has_terms |= self.step > 0

    def state(self) -> State:
        """See the base class."""
        return {"tokens": self.total_tokens, "failures": self.failures}

    def load(self, state: State) -> None:
        """See the base class."""
        self.total_tokens, self.failures = int(state["tokens"]), int(state["failures"])

    def add(self, report: StepReport, seconds: float) -> None:
        """Count a step."""
        self.step = report.batch.step
        self.total_tokens += report.batch.num_tokens
        self.tokens += report.batch.num_tokens
        self.seconds += seconds
        self.loss = report.loss
        self.skipped_steps += report.skipped is not None
        self.replays += report.replays
        self.failures = self.failures + 1 if report.skipped == NOT_FINITE else 0
        self.taken += 1
        self.has_terms |= report.skipped != NO_LOSS_TERMS


def train(run: Run) -> None:
    """Train from the feed's cursor, which is at `run.progress`, to the last step. Collective.

    Raises:
        TrainError: a signal asked to stop (`Preempted`), or too many steps in a row were not
            finite (`NonFiniteError`); the state is saved.
    """
    progress, config = run.progress, run.config
    _stop_if_asked(run, progress)
    if progress.step > 0:
        _evaluate_if_due(run, progress)  # which a signal may have ended
    elif config.eval.at_start:
        _evaluate(run, progress)
    while progress.step < run.context.total_steps:
        _take_step(run, progress)
        _refuse_no_terms(run, progress)
        _stop_if_not_finite(run, progress)
        _stop_if_asked(run, progress)
        _evaluate_if_due(run, progress)
        if _due(run, config.checkpoint.every) or run.checkpointer.is_due:
            _save(run, progress)
            _stop_if_asked(run, progress)
    if progress.saved_at != progress.step:
        _save(run, progress, is_last=True)
    _evaluate(run, progress)
    run.checkpointer.close()


def _take_step(run: Run, progress: Progress) -> None:
    """Take the next global batch, train on it, and report what came out. Collective."""
    started = time.perf_counter()
    run.context.world.note("data", step=progress.step + 1)
    batch = run.feed.next()
    run.feed.prefetch()
    report = train_step(run.context, batch, run.feed)
    run.context.world.note("report")
    seconds = time.perf_counter() - started
    progress.add(report, seconds)
    here, tokens = peak_bytes(run.context.world.device), progress.total_tokens
    progress.peak_bytes = max(progress.peak_bytes, report.peak_bytes, here)
    record = record_of(run.feed, report, tokens, seconds, run.flops)
    record["memory_bytes"] = progress.peak_bytes
    _add_metrics(record, run.context.parts)
    ids = batch.sample_ids
    run.reporter.step(record, ids, skipped_ids=() if report.skipped is None else ids)


def _add_metrics(record: dict[str, Any], parts: Sequence[Stateful]) -> None:
    """Add what parts with state give to a step's record."""
    for name, value in (pair for part in parts for pair in part.metrics().items()):
        if name in record or name in STEP_KEYS:
            raise ConfigError(f"parts: metrics() gives {name}, which the step has already: rename")
        record[name] = value


def _refuse_no_terms(run: Run, progress: Progress) -> None:
    """Refuse data of which an epoch, or all steps, have no loss term."""
    is_over = progress.step == run.context.total_steps or run.feed.cursor.epoch > 0
    if is_over and not progress.has_terms:
        raise DataError(
            f"data: no sample of the first {plural(progress.step, 'step')} has a loss term, so "
            "nothing was trained: give labels other than -100, or see `weights` of the objective"
        )


def _stop_if_not_finite(run: Run, progress: Progress) -> None:
    if progress.failures >= run.config.nonfinite.limit:
        text = f"loss or gradient not finite for {progress.failures} steps in a row"
        remedy = "lower optimizer.lr, or look at the data of these steps"
        error = f"step {progress.step}: {text} (nonfinite.limit): {remedy}"
        _end(run, progress, NonFiniteError(error))


def _stop_if_asked(run: Run, progress: Progress) -> None:
    """Stop before the last step where a signal came to any rank. Collective."""
    if progress.step < run.context.total_steps and run.checkpointer.poll(run.was_asked()):
        _end(run, progress, _preempted(progress.step))


def _end(run: Run, progress: Progress, error: TrainError) -> NoReturn:
    """End the run before its last step, saved."""
    if progress.saved_at != progress.step:
        _save(run, progress, is_last=True)
    run.checkpointer.close()
    ignore_further()
    raise error


def _preempted(step: int) -> Preempted:
    return Preempted(f"stopped after step {step}, which is saved")


def _due(run: Run, every: float | str | None) -> bool:
    """Whether a cadence in steps is due; one in seconds is the checkpointer's."""
    if every is None or isinstance(every, str):
        return False
    return run.progress.step % cadence_steps(every, run.context.total_steps) == 0


def _save(run: Run, progress: Progress, *, is_last: bool = False) -> None:
    run.checkpointer.save(progress.step, is_last=is_last)
    progress.saved_at = progress.step


def _evaluate_if_due(run: Run, progress: Progress) -> None:
    if _due(run, run.config.eval.every):
        _evaluate(run, progress)


def _evaluate(run: Run, progress: Progress) -> None:
    """Evaluate, once at a step, unless a signal comes; the run that goes on evaluates first."""
    if not run.held_out or progress.evaluated_at == progress.step:
        return
    progress.evaluated_at = progress.step
    started, context = time.perf_counter(), run.context
    run.feed.pause()
    try:
        with precise_statistics(context.model, run.feed, run.config.batchnorm.precise):
            means = evaluate_parts(
                context.model, context.objective, run.held_out, context.world, run.was_asked
            )
    except Preempted:
        _end(run, progress, _preempted(progress.step))
    run.reporter.evaluation(progress.step, means, time.perf_counter() - started)
    progress.evaluation = named_means(means)


def record_of(
    feed: Feed, report: StepReport, tokens: int, seconds: float, flops: ModelFlops | None = None
) -> dict[str, Any]:
    """Give what metrics.jsonl holds of a step, of whose numbers 0-d tensors may take the place.

    `tokens` are those consumed from the start of the run.
    """
    batch, order = report.batch, feed.source.order
    entry: dict[str, Any] = {
        "step": batch.step,
        "epoch": order.fractional_epoch(batch.samples.after),
        "samples": batch.samples.after.samples,
        "tokens": tokens,
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "accum_steps": batch.plan.accum_steps,
        "micro_batches": batch.plan.num_micro_batches,
        "padding": batch.plan.padding,
        "seconds": seconds,
        "tokens_per_second": batch.num_tokens / seconds if seconds else None,
    }
    entry |= flops.speed(batch.plan.lengths, seconds) if flops and seconds else {}
    if report.skipped is not None:
        entry["skipped"] = report.skipped
    entry |= {"replays": report.replays} if report.replays else {}
    entry |= {} if order.sizes.is_constant else {"batch_size": batch.samples.size}
    return {**entry, **report.metrics, **report.norms}
