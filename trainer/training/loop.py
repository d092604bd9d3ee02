"""The training loop: steps, evaluation, checkpoints, stop; micro-batches are of step.py.

It goes by an `OpenRun`: what a run consists of once it is open, and how far it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, final

import numpy as np

from trainer.config.amounts import is_due
from trainer.core.errors import ConfigError, DataError, NonFiniteError, Preempted, TrainError
from trainer.core.format import named_means, plural
from trainer.core.out_of_memory import peak_bytes
from trainer.core.signals import ignore_further
from trainer.core.stateful import DRAWN, STEP_KEYS, State, Stateful
from trainer.plan.cut import IntArray
from trainer.report.reporter import Reporter
from trainer.training.batches import Feed
from trainer.training.best_metric import BEST, STOP, BestMetric
from trainer.training.checkpointing import Checkpointer
from trainer.training.context import StepContext
from trainer.training.data import HeldOut
from trainer.training.evaluation import evaluate_parts
from trainer.training.step import NO_LOSS_TERMS, NOT_FINITE, StepReport, train_step


@final
@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run whose step, records and checkpoints are there."""

    context: StepContext
    feed: Feed
    reporter: Reporter
    checkpointer: Checkpointer  # saves checkpoints, and may add a cadence in seconds. Collective.
    was_asked: Callable[[], bool]  # whether a signal asked this rank to stop
    # Of the model; None on ranks that report nothing, and where they are not counted
    flops: ModelFlops | None
    progress: Progress
    # Lends the model as evaluations are to have it. Collective.
    evaluating: Callable[[StepContext, Feed], AbstractContextManager[None]]
    # Evaluates otherwise what is held out. Collective.
    further_means: Callable[[OpenRun, Mapping[str, HeldOut]], Mapping[str, Mapping[str, float]]]
    after_evaluation: Callable[[OpenRun], None]  # looks further at the model. Collective.

    save_every: float | str | None  # in steps, or in epochs; None is never
    evaluate_every: float | str | None
    evaluate_first: bool  # whether the model is evaluated before its first step
    most_failures: int  # steps in a row that are not finite, after which the run ends
    metrics: Mapping[str, BestMetric]  # those that evaluations are to give

    @property
    def best(self) -> BestMetric | None:
        """The metric by which a checkpoint is kept."""
        return self.metrics.get(BEST)

    @property
    def stopping(self) -> BestMetric | None:
        """The metric that ends the run when it gets no better."""
        return self.metrics.get(STOP)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.context.data.total_steps

    @property
    def early_end(self) -> str | None:
        """Why the run ends before its last step; None while nothing asks for it."""
        if self.progress.early_end is not None:
            return self.progress.early_end
        followed = self.stopping
        if followed is None or followed.num_since < followed.patience:
            return None
        return f"{followed.key}={followed.metric}: {followed.without_better}"


@final
@dataclass(kw_only=True)
class Progress(Stateful):
    """How far the loop has come."""

    step: int = 0  # optimizer steps taken, from the start of the run
    epochs: float = 0.0  # that were over where the last step began
    total_tokens: int = 0  # real input positions consumed, from the start of the run
    # The last one's metrics by name, made at step `evaluated_at`
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    saved_at: int | None = None  # step of the newest checkpoint
    # Why a feature ends the run before its last step, the same on every rank
    early_end: str | None = None
    failures: int = 0  # steps in a row, up to the last one, that were not finite
    taken: int = 0  # optimizer steps taken in this process
    # Whether a step had a loss term; taken for granted of steps of other processes
    has_terms: bool = False
    peak_bytes: int = 0  # the most memory that any rank has had in this process

    def state(self) -> State:
        """See the base class."""
        return {"tokens": self.total_tokens, "failures": self.failures, "epochs": self.epochs}

    def load(self, state: State) -> None:
        """See the base class."""
        self.total_tokens, self.failures = int(state["tokens"]), int(state["failures"])
        self.epochs = float(state.get("epochs", 0.0))

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self.step = report.batch.step
        self.total_tokens += report.batch.num_tokens
        # A step that was left out for another reason ends a row, too.
        self.failures += 1
        if report.skipped != NOT_FINITE:
            self.failures = 0
        self.taken += 1
        self.has_terms |= report.skipped != NO_LOSS_TERMS


@final
@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of forward and backward of one model, and what the devices can do."""

    per_token: float
    per_pair: float = 0.0  # of tokens of one sample
    peak: float | None = None  # of all ranks' devices, per second; None where nobody knows

    def speed(self, lengths: IntArray, seconds: float) -> dict[str, float]:
        """Give the figures of a step that took so long, over samples of so many tokens each."""
        tokens = lengths.astype(np.float64)
        flops = self.per_token * float(tokens.sum()) + self.per_pair * float((tokens**2).sum())
        each = flops / seconds
        speed = {"model_flops_per_second": each}
        if self.peak:
            speed["mfu"] = each / self.peak
        return speed


def train(run: OpenRun) -> None:
    """Train from the feed's cursor, which is at `run.progress`, to the last step. Collective.

    Where a signal asks to stop, or too many steps in a row are not finite, it raises, and the
    state is saved.
    """
    progress = run.progress
    _stop_if_asked(run)
    if progress.step > 0:
        _recall_best(run)
        # Which a signal may have ended after this step was saved.
        _evaluate_if_due(run)
    elif run.evaluate_first:
        _evaluate(run)
    while progress.step < run.total_steps and run.early_end is None:
        _take_step(run)
        _refuse_no_terms(run)
        if progress.failures >= run.most_failures:
            text = f"loss or gradient not finite for {progress.failures} steps in a row"
            remedy = "lower optimizer.lr, or look at the data of these steps"
            text = f"step {progress.step}: {text} (nonfinite.limit): {remedy}"
            _end(run, NonFiniteError(text))
        _stop_if_asked(run)
        _evaluate_if_due(run)
        is_due = _due(run, run.save_every) or run.checkpointer.is_due
        # It may have been saved as the best one already.
        if is_due and progress.saved_at != progress.step:
            _save(run)
            _stop_if_asked(run)
    if progress.saved_at != progress.step:
        _save(run, is_last=True)
    _evaluate(run)
    run.checkpointer.close()


def _take_step(run: OpenRun) -> None:
    """Take the next global batch, train on it, and report what came out. Collective."""
    started, progress, world = time.perf_counter(), run.progress, run.context.world
    world.note("data", step=progress.step + 1)
    progress.epochs = run.feed.data.order.fractional_epoch(run.feed.cursor)
    batch = run.feed.next()
    # The next global batch is loaded in the background while this one is computed.
    run.feed.prefetch()
    report = train_step(run.context, batch, run.feed)
    world.note("report")
    seconds = time.perf_counter() - started
    progress.add(report)
    here, tokens = peak_bytes(world.device), progress.total_tokens
    progress.peak_bytes = max(progress.peak_bytes, report.peak_bytes, here)
    record = step_record(run.feed, report, tokens, seconds, run.flops)
    record["memory_bytes"] = progress.peak_bytes
    for part in run.context.parts:
        metrics = part.metrics()
        for name in metrics:
            if name in record or name in STEP_KEYS:
                text = f"metrics() gives {name}, which the step has already: rename"
                raise ConfigError(f"parts: {text}")
        record |= metrics
    ids = batch.sample_ids
    skipped: Sequence[int] = ()
    if report.skipped is not None:
        skipped = ids
    ledger = {name: count for name, count in record.items() if name.startswith(DRAWN)}
    if batch.passed_ids:
        ledger["passed"] = batch.passed_ids
    run.reporter.step(record, ids, skipped_ids=skipped, **ledger)


def _refuse_no_terms(run: OpenRun) -> None:
    """Refuse data of which an epoch, or all steps, have no loss term."""
    is_over = run.progress.step == run.total_steps or run.feed.cursor.epoch > 0
    if is_over and not run.progress.has_terms:
        steps = plural(run.progress.step, "step")
        raise DataError(
            f"data: no sample of the first {steps} has a loss term, so "
            "nothing was trained: give labels other than -100, or see `weights` of the objective"
        )


def _stop_if_asked(run: OpenRun) -> None:
    """Stop before the last step where a signal came to any rank. Collective."""
    if run.progress.step < run.total_steps and run.checkpointer.poll(run.was_asked()):
        _end(run)


def _end(run: OpenRun, error: TrainError | None = None) -> NoReturn:
    """End the run before its last step, saved; without an error, since a signal asked for it."""
    if run.progress.saved_at != run.progress.step:
        _save(run, is_last=True)
    run.checkpointer.close()
    ignore_further()
    raise error or Preempted(f"stopped after step {run.progress.step}, which is saved")


def _due(run: OpenRun, every: float | str | None) -> bool:
    """Whether a cadence in steps or epochs is due; one in seconds is the checkpointer's."""
    now, before = run.feed.data.order.fractional_epoch(run.feed.cursor), run.progress.epochs
    return is_due(every, run.progress.step, run.total_steps, before, now)


def _save(run: OpenRun, *, is_last: bool = False) -> None:
    run.checkpointer.save(run.progress.step, is_last=is_last)
    run.progress.saved_at = run.progress.step


def _evaluate_if_due(run: OpenRun) -> None:
    if _due(run, run.evaluate_every):
        _evaluate(run)


def _evaluate(run: OpenRun) -> None:
    """Evaluate, once at a step, unless a signal comes; the run that goes on evaluates first."""
    progress, context = run.progress, run.context
    if not context.data.held_out or progress.evaluated_at == progress.step:
        return
    progress.evaluated_at = progress.step
    started = time.perf_counter()
    run.feed.pause()
    try:
        further = run.further_means(run, context.data.held_out)
        with run.evaluating(context, run.feed):
            means = {**evaluate_parts(context, context.data.held_out, run.was_asked), **further}
            run.reporter.evaluation(progress.step, means, time.perf_counter() - started)
            progress.evaluation = named_means(means)
            run.after_evaluation(run)
    except Preempted:
        _end(run)
    _take_evaluation(run)


def _take_evaluation(run: OpenRun, *, is_counted: bool = True) -> None:
    """Let what follows a metric see the last evaluation, and keep the best one's state."""
    progress = run.progress
    if run.stopping is not None and is_counted:
        run.stopping.see(progress.step, progress.evaluation)
    if run.best is not None and run.best.see(progress.step, progress.evaluation):
        if progress.saved_at != progress.step:
            _save(run)
        run.checkpointer.mark_best(progress.step, run.best.metric)


def refuse_unknown_metrics(run: OpenRun) -> None:
    """Refuse metrics that no evaluation gives: two held-out samples show which. Collective."""
    held_out = run.context.data.held_out
    for each in run.metrics.values():
        if not held_out:
            text = "nothing is held out, so nothing is evaluated: type data.holdout=0.05"
            raise ConfigError(f"{each.key}={each.metric}: {text}")
    if run.metrics:
        few = {name: replace(part, most=2) for name, part in held_out.items()}
        means = evaluate_parts(run.context, few, run.was_asked)
        found = named_means({**means, **run.further_means(run, few)})
        for each in run.metrics.values():
            each.check(found)


def _recall_best(run: OpenRun) -> None:
    """Catch up with what came behind the checkpoint of a run that goes on. Collective."""
    # A kill may have come before it was marked.
    if run.best is not None and run.best.step:
        run.checkpointer.mark_best(run.best.step, run.best.metric)
    if run.progress.evaluated_at == run.progress.step:
        # Patience counts evaluations as an uninterrupted run does: one that the former end alone
        # called for is not among them.
        _take_evaluation(run, is_counted=_due(run, run.evaluate_every))


def step_record(
    feed: Feed, report: StepReport, tokens: int, seconds: float, flops: ModelFlops | None = None
) -> dict[str, Any]:
    """Give what metrics.jsonl holds of a step, of whose numbers 0-d tensors may take the place.

    `tokens` are those consumed from the start of the run.
    """
    batch, order = report.batch, feed.data.order
    speed: float | None = None
    if seconds:
        speed = batch.num_tokens / seconds
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
        "tokens_per_second": speed,
    }
    if flops and seconds:
        entry |= flops.speed(batch.plan.lengths, seconds)
    if passed := batch.samples.after.passed:
        entry["passed_samples"] = passed
    if report.skipped is not None:
        entry["skipped"] = report.skipped
    if report.replays:
        entry["replays"] = report.replays
    if not order.sizes.is_constant:
        entry["batch_size"] = batch.samples.size
    entry |= feed.data.train.source_counts(batch.samples.ids)
    return {**entry, **report.metrics}
