"""Say how a run begins, and how it ended: on the screen, in result.json."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from trainer.assemble.features import EndOfRun
from trainer.assemble.run import Run
from trainer.assemble.saved import Saved, Terms, read_terms
from trainer.checkpoint.weights import StoredWeights
from trainer.commands.next_lines import next_lines
from trainer.config.run_config import contract as contract_of
from trainer.core.durable import write_record
from trainer.core.out_of_memory import peak_bytes
from trainer.core.rows import Row, record_of
from trainer.core.run_folder import RunFolder
from trainer.report.journal import least_loss, totals
from trainer.report.records import PlanRecord
from trainer.training.loop import OpenRun

BUILT_WHOLE = (
    "the model is built whole on every rank before it is sharded: only classes that declare "
    "draws_on_meta are built in shards"
)


def announce(
    opened: OpenRun, run: Run, rows: Sequence[Row], plan: PlanRecord, saved: Saved
) -> None:
    """Show what is about to happen, and why the run is laid out as it is."""
    data, config, reporter = run.data.train, run.config, opened.reporter
    if config.resume is None and data.num_skipped:
        reporter.passed_over(data.num_skipped, data.skipped)
    remarks = [feature.remark for feature in run.features]
    reporter.start(rows, plan, remarks, config.name or "")
    _name_weights(opened, run, saved.stored)
    if run.is_sharded and run.model.weights is None:
        reporter.line(BUILT_WHOLE)
    if (growth := _growth(opened, saved.terms)) is not None:
        reporter.line(growth)


def _name_weights(opened: OpenRun, run: Run, stored: StoredWeights | None) -> None:
    """Show which weights `init=` took, and warn where they may know what is held out here."""
    if stored is None or stored.is_resumed:
        return
    config, taken, reporter = run.config, stored.loaded, opened.reporter
    if taken is not None:
        for message in taken.messages:
            reporter.warn(message)
        before, now = read_terms(taken), contract_of(config)
        # Of equal data another fingerprint is another part: by another share, or seed.
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


def finish(opened: OpenRun, run: Run, plan: PlanRecord, folder: Path, at: float) -> None:
    """Write result.json, and show what a person wants to know at the end. Collective."""
    world, config, trained = run.world, run.config, opened.progress
    # A phase is counted once the next begins.
    world.note("end")
    phases = world.collect(world.times.spending())
    peaks = world.collect(peak_bytes(world.device))
    if not world.is_main:
        return
    metrics = trained.evaluation
    # Losses of simple models over the same samples, in nats per token, which the data may know.
    entropies, own = run.data.train.facts.byte_entropies, run.data.own_part
    simple: dict[str, float] = {}
    # Held-out data from elsewhere are not those whose bytes were counted.
    if entropies is not None and own and config.data.eval_path is None:
        found = asdict(entropies(own.chosen(0, own.num_samples)))
        simple = {f"byte {name}": value for name, value in found.items()}
    # By the metric that the run follows, or by what every evaluation gives.
    followed = opened.best or opened.stopping
    best = followed.found if followed else least_loss(folder / RunFolder.METRICS)
    end = EndOfRun(run=run, opened=opened, plan=plan, phases=phases)
    rows = [*chain.from_iterable(each.end_rows(end) for each in run.features)]
    # Patience that is over with the last step ended nothing.
    stopped = opened.early_end if trained.step < run.data.total_steps else None
    result = {
        "step": trained.step,
        "eval_loss": metrics.get("loss", metrics.get("eval_loss")),
        **totals(folder / RunFolder.METRICS),
        "seconds": round(time.perf_counter() - at, 3),
        "metrics": dict(metrics),
        "best": best,
        "stopped": stopped,
        "baselines": simple,
        "peak_bytes": max(peaks),
        **record_of(rows),
    }
    write_record(folder / RunFolder.RESULT, result)
    commands = next_lines(run, folder, stopped_early=stopped is not None)
    opened.reporter.finish(result, commands, rows)
