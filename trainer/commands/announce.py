"""Show what is about to be trained, and why the run is laid out as it is."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.assemble.components import Components
from trainer.assemble.saved import Saved, Terms, read_terms
from trainer.checkpoint.weights import StoredWeights
from trainer.config.run_config import contract as contract_of
from trainer.core.rows import Row
from trainer.report.records import PlanRecord
from trainer.training.run import Run

BUILT_WHOLE = (
    "the model is built whole on every rank before it is sharded: only classes that declare "
    "draws_on_meta are built in shards"
)


def announce(
    run: Run,
    components: Components,
    rows: Sequence[Row],
    plan: PlanRecord,
    saved: Saved,
) -> None:
    """Show what is about to happen, and why the run is laid out as it is."""
    data, config, reporter = components.train_set, components.config, run.reporter
    if config.resume is None and data.num_skipped:
        reporter.passed_over(data.num_skipped, data.skipped)
    reporter.start(rows, plan, name=config.name)
    _name_weights(run, components, saved.stored)
    whole = BUILT_WHOLE * (components.is_sharded and components.weights is None)
    for line in filter(None, (*components.parallel.reasons, whole, _growth(run, saved.terms))):
        reporter.line(line)


def _name_weights(run: Run, components: Components, stored: StoredWeights | None) -> None:
    """Show which weights `init=` took, and warn where they may know what is held out here."""
    if stored is None or stored.is_resumed:
        return
    config, taken, reporter = run.config, stored.loaded, run.reporter
    if taken is not None:
        for message in taken.messages:
            reporter.warn(message)
        before, now = read_terms(taken), contract_of(config)
        keys = ("data._target_", "data.path")
        is_same_data = all(before.contract.get(key) == now.get(key) for key in keys)
        if is_same_data and before.fingerprint != components.train_set.fingerprint:
            reporter.warn(
                "init: those weights were trained on another part of these data, so that samples "
                "held out here may be ones they were trained on"
            )
    reporter.line(f"init: weights of {taken or config.init}")


def _growth(run: Run, before: Terms) -> str | None:
    """Describe a schedule that was made for fewer steps than the run now has."""
    context, cursor = run.context, run.feed.cursor
    step, scale = cursor.step, context.lr_scale(cursor)
    total = before.total_steps or context.total_steps
    if total == context.total_steps or step >= context.total_steps:
        return None
    lr = context.lr * scale * context.schedule.factor(step, context.total_steps)
    what = f"steps {total} -> {context.total_steps}: the schedule now spans them all"
    return f"{what}: lr {lr:.2e} at step {step + 1}"
