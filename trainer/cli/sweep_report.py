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

NOT_STARTED = "not started"

_STYLES = ("o-", "x--", "s:", "+-.")
"""Of the lines of the plot, so that one shows where it is below another, as equal cuts are."""

_MEASURED = ("step", "loss", "eval_loss", "tokens_per_second", "seconds")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a sweep.

    Attributes:
        number: its place in the sweep, from 0.
        overrides: what it ran with, or is to run with, by key.
        folder: its run folder; `None` if it never started.
        state: as in status.json, or `not started`.
        exit_code: as in status.json.
        result: as in result.json; empty where the job did not get that far.
    """

    number: int
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
    def eval_loss(self) -> float | None:
        """The held-out loss at the end, where there is a finite one."""
        value = self.result.get("eval_loss")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def collect(folder: Path, planned: Sequence[Sequence[str]]) -> list[Job]:
    """Read what became of every job of a sweep.

    Args:
        folder: the sweep folder.
        planned: overrides of the jobs that were to run, in order; none where the sweeper chooses
            as it goes.

    Returns:
        The jobs in order of their numbers.
    """
    found = {_number(path.parent): path.parent for path in folder.glob("*/.hydra")}
    numbers = sorted({*range(len(planned)), *found})
    return [_job(number, found.get(number), planned) for number in numbers]


def report(folder: Path, planned: Sequence[Sequence[str]], console: Console) -> list[Job]:
    """Show the table of a sweep, and write `sweep.csv` and, with matplotlib, `sweep.png`.

    Args:
        folder: the sweep folder; nothing is written if it does not exist.
        planned: as for `collect`.
        console: where the table goes.

    Returns:
        The jobs.
    """
    jobs = collect(folder, planned)
    if not jobs:
        return jobs
    keys = _varied(jobs)
    console.print(_table(jobs, keys))
    if folder.is_dir():
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


def _job(number: int, folder: Path | None, planned: Sequence[Sequence[str]]) -> Job:
    record = None if folder is None else folder / ".hydra" / "overrides.yaml"
    typed = yaml.safe_load(record.read_text()) if record is not None and record.is_file() else None
    status = {} if folder is None else read_status(folder)
    result = {} if folder is None else durable.read_json(folder / "result.json")
    return Job(
        number=number,
        overrides=_by_key(typed or (planned[number] if number < len(planned) else ())),
        folder=folder,
        state=NOT_STARTED if folder is None else str(status.get("state", "failed")),
        exit_code=status.get("exit_code"),
        result={"step": status.get("step"), **result},
    )


def _number(folder: Path) -> int:
    head = folder.name.split("-")[0].split("_")[0]
    return int(head) if head.isdecimal() else 0


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    pairs = (line.lstrip("+").partition("=") for line in overrides)
    return {key.replace("/", "."): value for key, _, value in pairs}


def _varied(jobs: Sequence[Job]) -> list[str]:
    """The keys that differ between jobs, in the order they were typed."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]


def _best(jobs: Sequence[Job]) -> Job | None:
    measured = [job for job in jobs if job.is_completed and job.eval_loss is not None]
    return min(measured, key=lambda job: job.eval_loss or 0.0, default=None)


def _table(jobs: Sequence[Job], keys: Sequence[str]) -> Table:
    best = _best(jobs)
    table = Table(title="sweep", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for key in ("job", *keys):
        table.add_column(key.replace(".", ".\n"), justify="right", no_wrap=True)
    for column in ("state", "step", "loss", "held-out\nloss", "tokens/s", "seconds"):
        table.add_column(column, justify="left" if column == "state" else "right", no_wrap=True)
    for job in jobs:
        style = "bold green" if job is best else ("" if job.is_completed else "red")
        table.add_row(
            str(job.number),
            *(job.overrides.get(key, "") for key in keys),
            job.state,
            *(_figure(job.result.get(name), name) for name in _MEASURED),
            style=style,
        )
    return table


def _figure(value: object, name: str) -> str:
    if not isinstance(value, int | float):
        return "-"
    if name in {"loss", "eval_loss"}:
        return f"{value:.4f}"
    return f"{value:,.1f}" if name == "seconds" else f"{value:,.0f}"


def _csv(jobs: Sequence[Job], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *keys, "state", "exit_code", *_MEASURED, "folder"])
    for job in jobs:
        writer.writerow(
            [
                job.number,
                *(job.overrides.get(key, "") for key in keys),
                job.state,
                "" if job.exit_code is None else job.exit_code,
                *(_cell(job.result.get(name)) for name in _MEASURED),
                job.folder or "",
            ]
        )
    return text.getvalue()


def _cell(value: object) -> str:
    return "" if value is None else show(value)


def _plot(path: Path, jobs: Sequence[Job], keys: Sequence[str]) -> bool:
    """Draw the held-out loss over the swept key; says whether there was anything to draw with."""
    measured = [job for job in jobs if job.eval_loss is not None]
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
        names = [_label(job, keys) for job in measured]
        axes.barh(names, [job.eval_loss or 0.0 for job in measured])
        axes.invert_yaxis()
        axes.set_xlabel("held-out loss")
    else:
        _draw_lines(axes, measured, key, [other for other in keys if other != key])
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    durable.write_file_atomic(path, image.getvalue())
    return True


def _draw_lines(axes: Any, jobs: Sequence[Job], key: str, others: Sequence[str]) -> None:  # noqa: ANN401 - matplotlib is optional
    """One line per setting of the other keys, the held-out loss over `key`."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        point = (float(job.overrides[key]), job.eval_loss or 0.0)
        lines.setdefault(_label(job, others), []).append(point)
    styles = itertools.cycle(_STYLES)
    for (label, points), style in zip(lines.items(), styles, strict=False):
        axes.plot(*zip(*sorted(points), strict=True), style, label=label)
    values = sorted(point[0] for points in lines.values() for point in points)
    if values[0] > 0 and values[-1] / values[0] >= 4:  # noqa: PLR2004 - two doublings
        axes.set_xscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel("held-out loss")
    if others:
        axes.legend()


def _label(job: Job, keys: Sequence[str]) -> str:
    words = [f"{key}={job.overrides.get(key, '')}" for key in keys]
    return " ".join(words) or f"job {job.number}"


def _is_axis(key: str, jobs: Sequence[Job]) -> bool:
    """Whether every job has a number for `key`."""
    try:
        return all(math.isfinite(float(job.overrides[key])) for job in jobs)
    except (KeyError, ValueError):
        return False
