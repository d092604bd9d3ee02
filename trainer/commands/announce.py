"""Show what is about to be trained, and why the run is laid out as it is."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.assemble.run import Run
from trainer.assemble.saved import Saved, Terms, read_terms
from trainer.checkpoint.weights import StoredWeights
from trainer.config.run_config import contract as contract_of
from trainer.core.rows import Row
from trainer.report.records import PlanRecord
from trainer.training.run import OpenRun

BUILT_WHOLE = (
    "the model is built whole on every rank before it is sharded: only classes that declare "
    "draws_on_meta are built in shards"
)


def announce(
    opened: OpenRun,
    run: Run,
    rows: Sequence[Row],
    plan: PlanRecord,
    saved: Saved,
) -> None:
    """Show what is about to happen, and why the run is laid out as it is."""
    data, config, reporter = run.data.train, run.config, opened.reporter
    if config.resume is None and data.num_skipped:
        reporter.passed_over(data.num_skipped, data.skipped)
    remarks = [feature.remark for feature in run.features]
    reporter.start(rows, plan, remarks, config.name or "")
    _name_weights(opened, run, saved.stored)
    whole = BUILT_WHOLE * (run.is_sharded and run.model.weights is None)
    setup = run.model.setup
    for line in filter(None, (setup.why_mode, setup.why, whole, _growth(opened, saved.terms))):
        reporter.line(line)


def _name_weights(opened: OpenRun, run: Run, stored: StoredWeights | None) -> None:
    """Show which weights `init=` took, and warn where they may know what is held out here."""
    if stored is None or stored.is_resumed:
        return
    config, taken, reporter = run.config, stored.loaded, opened.reporter
    if taken is not None:
        for message in taken.messages:
            reporter.warn(message)
        before, now = read_terms(taken), contract_of(config)
        keys = ("data._target_", "data.path")
        is_same_data = all(before.contract.get(key) == now.get(key) for key in keys)
        if is_same_data and before.fingerprint != run.data.train.fingerprint:
            reporter.warn(
                "init: those weights were trained on another part of these data, so that samples "
                "held out here may be ones they were trained on"
            )
    reporter.line(f"init: weights of {taken or config.init}")


def _growth(opened: OpenRun, before: Terms) -> str | None:
    """Describe a schedule that was made for fewer steps than the run now has."""
    model, cursor, steps = opened.context.model, opened.feed.cursor, opened.total_steps
    total = before.total_steps or steps
    if total == steps or cursor.step >= steps:
        return None
    scale = model.lr_scale(opened.feed.data.order, cursor)
    lr = model.spec.lr * scale * model.schedule.factor(cursor.step, steps)
    what = f"steps {total} -> {steps}: the schedule now spans them all"
    return f"{what}: lr {lr:.2e} at step {cursor.step + 1}"
