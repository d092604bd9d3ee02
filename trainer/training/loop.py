"""The training loop: steps, evaluation, checkpoints, stop; micro-batches are of step.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from trainer.config.amounts import is_due
from trainer.core.errors import ConfigError, DataError, NonFiniteError, Preempted, TrainError
from trainer.core.format import named_means, plural
from trainer.core.out_of_memory import peak_bytes
from trainer.core.signals import ignore_further
from trainer.core.stateful import STEP_KEYS, Stateful
from trainer.training.batches import Feed
from trainer.training.best_metric import BestMetric
from trainer.training.evaluation import evaluate_parts
from trainer.training.model_flops import ModelFlops
from trainer.training.run import Progress, Run
from trainer.training.step import StepReport, train_step


def train(run: Run) -> None:
    """Train from the feed's cursor, which is at `run.progress`, to the last step. Collective.

    Where a signal asks to stop, or too many steps in a row are not finite, it raises, and the
    state is saved.
    """
    progress, config = run.progress, run.config
    _stop_if_asked(run, progress)
    _check_metrics(run)
    if progress.step > 0:
        _recall_best(run)
        _evaluate_if_due(run, progress)  # which a signal may have ended
    elif config.eval.at_start:
        _evaluate(run, progress)
    while progress.step < run.context.total_steps and run.no_better is None:
        _take_step(run, progress)
        _refuse_no_terms(run, progress)
        _stop_if_not_finite(run, progress)
        _stop_if_asked(run, progress)
        _evaluate_if_due(run, progress)
        is_due = _due(run, config.checkpoint.every) or run.checkpointer.is_due
        if is_due and progress.saved_at != progress.step:  # not yet as the best one
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
    progress.add(report)
    progress.epochs = run.feed.source.order.fractional_epoch(batch.samples.before)
    here, tokens = peak_bytes(run.context.world.device), progress.total_tokens
    progress.peak_bytes = max(progress.peak_bytes, report.peak_bytes, here)
    record = step_record(run.feed, report, tokens, seconds, run.flops)
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
    """Whether a cadence in steps or epochs is due; one in seconds is the checkpointer's."""
    now, before = run.feed.source.order.fractional_epoch(run.feed.cursor), run.progress.epochs
    return is_due(every, run.progress.step, run.context.total_steps, before, now)


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
        with run.evaluating(context.model, run.feed):
            means = evaluate_parts(
                context.model, context.objective, run.held_out, context.world, run.was_asked
            )
            run.reporter.evaluation(progress.step, means, time.perf_counter() - started)
            run.after_evaluation(run)
    except Preempted:
        _end(run, progress, _preempted(progress.step))
    progress.evaluation = named_means(means)
    _take_evaluation(run)


def _take_evaluation(run: Run, *, is_counted: bool = True) -> None:
    """Let what follows a metric see the last evaluation, and keep the best one's state."""
    progress = run.progress
    if run.stopping is not None and is_counted:
        run.stopping.see(progress.step, progress.evaluation)
    if run.best is not None and run.best.see(progress.step, progress.evaluation):
        if progress.saved_at != progress.step:
            _save(run, progress)
        run.checkpointer.mark_best(progress.step)


def _check_metrics(run: Run) -> None:
    """Refuse metrics that no evaluation gives before the first step: two samples show which."""
    ranked_by = BestMetric(key="sweep.metric", metric=run.config.sweep.metric, mode="min")
    is_default = ranked_by.metric == "eval_loss"  # a run in no sweep has it too
    own = ranked_by if ranked_by.metric.startswith("eval_") and not is_default else None
    followed = [each for each in (run.best, run.stopping, own) if each is not None]
    for each in followed:
        if not run.held_out:
            text = "nothing is held out, so nothing is evaluated: type data.holdout=0.05"
            raise ConfigError(f"{each.key}={each.metric}: {text}")
    if followed:
        few = {name: replace(part, most=2) for name, part in run.held_out.items()}
        context = run.context
        means = evaluate_parts(context.model, context.objective, few, context.world, run.was_asked)
        for each in followed:
            each.check(named_means(means))


def _recall_best(run: Run) -> None:
    """Catch up with what came behind the checkpoint of a run that goes on. Collective."""
    if run.best is not None and run.best.step:  # a kill may have come before it was marked
        run.checkpointer.mark_best(run.best.step)
    if run.progress.evaluated_at == run.progress.step:
        # Patience counts evaluations as an uninterrupted run does: one that the former end alone
        # called for is not among them.
        _take_evaluation(run, is_counted=_due(run, run.config.eval.every))


def step_record(
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
