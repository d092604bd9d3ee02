"""The training loop: steps, evaluation, checkpoints, stop. It is blind to micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, final

from trainer.config.messages import first_of
from trainer.core.errors import NonFiniteError, Preempted, TrainError
from trainer.core.signals import ignore_further
from trainer.plan.order import Order
from trainer.report.reporter import Reporter
from trainer.training.batches import Feed
from trainer.training.checkpointing import Checkpointer
from trainer.training.evaluation import HeldOut, evaluate
from trainer.training.kit import Kit
from trainer.training.progress import Trained, record_of
from trainer.training.step import train_step


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, composed once; cadences are in optimizer steps.

    Attributes:
        tokens: real input positions consumed before this process began.
        failures: steps that were not finite, in a row, when this process began.
        evaluation: metrics of an evaluation that was made at the cursor before this process began.
        checkpointer: saves checkpoints, and may add a cadence in seconds. Collective.
        must_stop: whether a signal asked any rank to stop; hears of checkpoints that were written
            behind the steps, too. Collective.
        was_asked: whether a signal asked this rank to stop.
    """

    kit: Kit
    order: Order
    feed: Feed
    held_out: HeldOut | None
    reporter: Reporter
    checkpointer: Checkpointer
    must_stop: Callable[[], bool]
    was_asked: Callable[[], bool]
    eval_every: int | None
    checkpoint_every: int | None
    nonfinite_limit: int
    tokens: int = 0
    failures: int = 0
    evaluation: Mapping[str, float] | None = None


def train(run: Run) -> Trained:
    """Train from the feed's cursor to the last step. Collective.

    Raises:
        TrainError: a signal asked to stop (`Preempted`), or too many steps in a row were not
            finite (`NonFiniteError`); the state is saved.
    """
    progress = Trained(step=run.feed.cursor.step, total_tokens=run.tokens, failures=run.failures)
    _catch_up(run, progress)
    while progress.step < run.kit.total_steps:
        _take_step(run, progress)
        end = _early_end(run, progress.step, progress.failures)
        if end is not None:
            _end(run, progress, end)
        if _due(progress.step, run.eval_every):
            _evaluate(run, progress)
        if _due(progress.step, run.checkpoint_every) or run.checkpointer.is_due:
            _save(run, progress)
            _stop_if_asked(run, progress)
    if progress.saved_at != progress.step:
        _save(run, progress, is_last=True)
    if progress.evaluated_at != progress.step:
        _evaluate(run, progress)
    run.checkpointer.close()
    return progress


def _take_step(run: Run, progress: Trained) -> None:
    """Take the next global batch, train on it, and tell what came out. Collective."""
    started = time.perf_counter()
    run.kit.world.note("data", step=progress.step + 1)
    batch = run.feed.next()
    run.feed.prefetch()
    with run.feed.naming_samples(batch):
        report = train_step(run.kit, batch, run.feed)
    run.kit.world.note("report")
    seconds = time.perf_counter() - started
    progress.add(report, seconds)
    record = record_of(run.order, report, progress.total_tokens, seconds)
    ids = batch.sample_ids
    run.reporter.step(record, ids, skipped_ids=() if report.skipped is None else ids)
    if names := run.kit.model_state.news():
        run.reporter.warn(
            f"forward writes into {first_of(names)}: each rank into its own, by the "
            "samples it sees; after every step all ranks go on with rank 0's, which are saved"
        )


def _stop_if_asked(run: Run, progress: Trained) -> None:
    """Stop where a signal came while no step was taken. Collective.

    Raises:
        Preempted: one did.
    """
    if progress.step < run.kit.total_steps and run.must_stop():
        _end(run, progress, _preempted(progress.step))


def _catch_up(run: Run, progress: Trained) -> None:
    """Do what was due at the first step boundary and is not done.

    Raises:
        Preempted: a signal came before the first step.
    """
    if run.evaluation is not None:
        progress.evaluation, progress.evaluated_at = run.evaluation, progress.step
    if run.checkpointer.newest is not None:
        progress.saved_at = progress.step
    _stop_if_asked(run, progress)
    is_due = progress.step > 0 and _due(progress.step, run.eval_every)
    if is_due and progress.evaluated_at != progress.step < run.kit.total_steps:
        _evaluate(run, progress)


def _end(run: Run, progress: Trained, end: TrainError) -> NoReturn:
    """End the run before its last step, saved.

    Raises:
        end: always.
    """
    if progress.saved_at != progress.step:
        _save(run, progress, is_last=True)
    run.checkpointer.close()
    ignore_further()
    raise end


def _early_end(run: Run, step: int, failures: int) -> TrainError | None:
    if failures >= run.nonfinite_limit:
        return NonFiniteError(
            f"step {step}: loss or gradient not finite for {failures} steps in a row "
            "(nonfinite.limit): lower optimizer.lr, or look at the data of these steps"
        )
    if run.must_stop() and step < run.kit.total_steps:
        return _preempted(step)
    return None


def _preempted(step: int) -> Preempted:
    return Preempted(f"stopped after step {step}, which is saved")


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _save(run: Run, progress: Trained, *, is_last: bool = False) -> None:
    run.checkpointer.save(progress.total_tokens, progress.failures, is_last=is_last)
    progress.saved_at = progress.step


def _evaluate(run: Run, progress: Trained) -> None:
    """Evaluate, unless a signal comes.

    Raises:
        Preempted: one came; the run that goes on from here evaluates first.
    """
    progress.evaluated_at = progress.step
    if run.held_out is None:
        return
    started = time.perf_counter()
    kit = run.kit
    run.feed.pause()
    try:
        metrics = evaluate(kit.model, kit.objective, run.held_out, kit.world, run.was_asked)
    except Preempted:
        _end(run, progress, _preempted(progress.step))
    seconds = time.perf_counter() - started
    run.reporter.evaluation(progress.step, metrics, seconds)
    progress.evaluation = metrics
