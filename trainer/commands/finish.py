"""Say how a run ended: result.json, and what a person types next."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from trainer.assemble.run import Run
from trainer.core.durable import write_record
from trainer.core.format import shown_path
from trainer.core.out_of_memory import peak_bytes
from trainer.core.rows import record_of
from trainer.core.run_folder import RunFolder
from trainer.report.journal import totals
from trainer.report.records import PlanRecord
from trainer.report.run_status import to_go_on, trusting
from trainer.report.time_table import advice, split_times, time_table
from trainer.report.views import views
from trainer.training.run import OpenRun


def finish(opened: OpenRun, run: Run, plan: PlanRecord, folder: Path, at: float) -> None:
    """Write result.json, and show what a person wants to know at the end. Collective."""
    world, config, trained = run.world, run.config, opened.progress
    world.note("end")
    spendings = world.collect(world.times.spending())  # of the steps' phases, by rank
    peaks = world.collect(peak_bytes(world.device))
    if not world.is_main:
        return
    table = time_table(spendings) if trained.taken else None
    metrics = trained.evaluation
    # Losses of simple models over the same samples, in nats per token, which the data may know.
    entropies, own = run.data.train.facts.byte_entropies, run.data.own_part
    simple: dict[str, float] = {}
    if entropies is not None and own and config.data.eval_path is None:
        found = asdict(entropies(own.chosen(0, own.num_samples)))
        simple = {f"byte {name}": value for name, value in found.items()}
    rows = [*chain.from_iterable(each.end_rows(opened, run) for each in run.features)]
    result = {
        "step": trained.step,
        "eval_loss": metrics.get("loss", metrics.get("eval_loss")),
        **totals(folder / RunFolder.METRICS),
        "seconds": round(time.perf_counter() - at, 3),
        "metrics": dict(metrics),
        "best": opened.best and opened.best.found,
        "stopped": opened.no_better if trained.step < run.data.total_steps else None,
        "baselines": simple,
        "peak_bytes": max(peaks),
        "time": table,
        **record_of(rows),
        "advice": (table and advice(split_times(spendings), table, plan)) or [],
    }
    write_record(folder / RunFolder.RESULT, result)
    shown = shown_path(folder)
    trust = " ".join(["", *trusting(config, folder)])
    clock, steps = "steps", run.data.total_steps
    if config.total_epochs is not None:
        clock, steps = "epochs", config.total_epochs
    commands = (
        *(f"{shown_path(folder / view.file)}  ({view.about})" for view in views().values()),
        f"train evaluate run={shown}{trust}",
        f"train export run={shown} export.to=exported{trust}",
        f"{to_go_on(config, folder)} "
        + ("stop.metric=null" if result["stopped"] else f"{clock}={2 * steps}"),
    )
    opened.reporter.finish(result, commands, rows)
