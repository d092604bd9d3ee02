"""Report a sweep at its end: what its jobs became, as a table on screen, a CSV file and a plot.

Everything is read from the job folders, so it does not matter which launcher or process ran a
job, or whether the sweep was stopped half-way.
"""

from __future__ import annotations

import csv
import io
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml
from rich.console import Console
from rich.table import Table

from trainer.checkpoint.status import read_status
from trainer.cli.saved_runs import COMPLETED
from trainer.config.messages import show
from trainer.core import durable
from trainer.core.format import duration

_SHOWN = (("step", "step"), ("loss", "loss"), ("eval_loss", "held-out loss"))
"""Figures of a result that one line shows, and their names there."""

_MEASURED = ("step", "loss", "eval_loss", "tokens_per_second", "seconds")
_TITLES = ("state", "step", "loss", "held-out\nloss", "tokens/s", "seconds")
_STYLES = ("o-", "x--", "s:", "+-.")
"""Of the lines of the plot, so that one shows where it is below another, as equal cuts are."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweptJob:
    """One run of a sweep.

    Attributes:
        overrides: what it ran with, or is to run with, by key.
        folder: its run folder; `None` if it never started.
        state: as in status.json, or `not started`.
        exit_code: as in status.json.
        result: as in result.json, the step of status.json where it did not get that far.
    """

    overrides: Mapping[str, str]
    folder: Path | None
    state: str
    exit_code: int | None
    result: Mapping[str, Any]

    @property
    def is_completed(self) -> bool:
        """Whether the run ended as it should."""
        return self.state == COMPLETED

    @property
    def eval_loss(self) -> float:
        """The held-out loss at the end; infinite where there is none."""
        value = self.result.get("eval_loss")
        return float(value) if isinstance(value, int | float) else math.inf


def report(folder: Path, planned: Sequence[Sequence[str]], console: Console) -> list[SweptJob]:
    """Show the table of a sweep, and write `sweep.csv` and, with matplotlib, `sweep.png`.

    Args:
        folder: the sweep folder; nothing is written if it does not exist.
        planned: overrides of the jobs that were to run, in order; none where the sweeper chooses
            as it goes.
        console: where the table goes.

    Returns:
        The jobs in order of their numbers.
    """
    found = {_number(path.parent): path.parent for path in folder.glob("*/.hydra")}
    count = max([len(planned), *(number + 1 for number in found)])
    jobs = [_job(found.get(n), planned[n] if n < len(planned) else ()) for n in range(count)]
    # The keys that differ between jobs, in the order they were typed.
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    keys = [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]
    if jobs:
        console.print(_table(jobs, keys))
    if jobs and folder.is_dir():
        durable.write_file_atomic(folder / "sweep.csv", _csv(jobs, keys).encode())
        written = ["sweep.csv", *(["sweep.png"] if _plot(folder / "sweep.png", jobs, keys) else [])]
        console.print(f"[dim]{' and '.join(written)} in[/] {folder}", soft_wrap=True)
    return jobs


def job_line(folder: Path) -> str:
    """Say in a few words what became of a job; its train.log says it in full."""
    status, result = read_status(folder), durable.read_json(folder / "result.json")
    words = [str(status.get("state", "failed"))]
    if status.get("exit_code"):
        words.append(f"exit code {status['exit_code']}")
    words += [f"{name} {_figure(result[key], key)}" for key, name in _SHOWN if result.get(key)]
    seconds = result.get("seconds")
    return ", ".join([*words, *([duration(seconds)] if isinstance(seconds, int | float) else [])])


def _job(folder: Path | None, planned: Sequence[str]) -> SweptJob:
    if folder is None:
        return SweptJob(
            overrides=_by_key(planned), folder=None, state="not started", exit_code=None, result={}
        )
    record = folder / ".hydra" / "overrides.yaml"
    typed = yaml.safe_load(record.read_text()) if record.is_file() else None
    status = read_status(folder)
    return SweptJob(
        overrides=_by_key(typed or planned),
        folder=folder,
        state=str(status.get("state", "failed")),
        exit_code=status.get("exit_code"),
        result={"step": status.get("step"), **durable.read_json(folder / "result.json")},
    )


def _number(folder: Path) -> int:
    head = folder.name.split("-")[0].split("_")[0]
    return int(head) if head.isdecimal() else 0


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    pairs = (line.lstrip("+").partition("=") for line in overrides)
    return {key.replace("/", "."): value for key, _, value in pairs}


def _table(jobs: Sequence[SweptJob], keys: Sequence[str]) -> Table:
    best = min(jobs, key=lambda job: job.eval_loss if job.is_completed else math.inf)
    table = Table(title="sweep", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for title in ("job", *(key.replace(".", ".\n") for key in keys), *_TITLES):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for number, job in enumerate(jobs):
        is_best = job is best and job.is_completed and math.isfinite(job.eval_loss)
        table.add_row(
            str(number),
            *(job.overrides.get(key, "") for key in keys),
            job.state,
            *(_figure(job.result.get(name), name) for name in _MEASURED),
            style="bold green" if is_best else ("" if job.is_completed else "red"),
        )
    return table


def _figure(value: object, name: str) -> str:
    if not isinstance(value, int | float):
        return "-"
    if name in {"loss", "eval_loss"}:
        return f"{value:.4f}"
    return f"{value:,.1f}" if name == "seconds" else f"{value:,.0f}"


def _csv(jobs: Sequence[SweptJob], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *keys, "state", "exit_code", *_MEASURED, "folder"])
    for number, job in enumerate(jobs):
        values = (job.exit_code, *(job.result.get(name) for name in _MEASURED))
        typed = (job.overrides.get(key, "") for key in keys)
        cells = ("" if value is None else show(value) for value in values)
        writer.writerow([number, *typed, job.state, *cells, job.folder or ""])
    return text.getvalue()


def _plot(path: Path, jobs: Sequence[SweptJob], keys: Sequence[str]) -> bool:
    """Draw the held-out loss over the swept key; says whether there was anything to draw with."""
    measured = [job for job in jobs if math.isfinite(job.eval_loss)]
    if not measured:
        return False
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    key = next((key for key in keys if _is_axis(key, measured)), None)
    if key is None:
        labels = [_label(job, keys) for job in measured]
        axes.barh(labels, [job.eval_loss for job in measured])
        axes.invert_yaxis()
        axes.set_xlabel("held-out loss")
    else:
        _draw_lines(axes, measured, key, [other for other in keys if other != key])
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    durable.write_file_atomic(path, image.getvalue())
    return True


def _draw_lines(axes: Any, jobs: Sequence[SweptJob], key: str, others: Sequence[str]) -> None:  # noqa: ANN401 - matplotlib is optional
    """One line per setting of the other keys, the held-out loss over `key`."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        point = (float(job.overrides[key]), job.eval_loss)
        lines.setdefault(_label(job, others), []).append(point)
    for (label, points), style in zip(lines.items(), itertools.cycle(_STYLES), strict=False):
        axes.plot(*zip(*sorted(points), strict=True), style, label=label)
    values = sorted(point[0] for points in lines.values() for point in points)
    if values[0] > 0 and values[-1] / values[0] >= 4:  # noqa: PLR2004 - two doublings
        axes.set_xscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel("held-out loss")
    if others:
        axes.legend()


def _label(job: SweptJob, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={job.overrides.get(key, '')}" for key in keys)


def _is_axis(key: str, jobs: Sequence[SweptJob]) -> bool:
    """Whether every job has a number for `key`."""
    try:
        return all(math.isfinite(float(job.overrides[key])) for job in jobs)
    except (KeyError, ValueError):
        return False
