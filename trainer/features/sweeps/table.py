"""Show how the jobs of a sweep ended, best first: on the screen, in sweep.csv and sweep.png.

All is read from the folders of the jobs, so it does not matter which launcher or process ran a job,
or whether the sweep was stopped half-way.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from trainer.cli import saved_runs
from trainer.config.messages import by_key, show
from trainer.config.metric_mode import is_comparable, rank, title_of
from trainer.core.durable import write_file_atomic
from trainer.core.format import figure_name, is_held_out
from trainer.core.run_folder import RunFolder
from trainer.report.journal import EVAL_SECONDS, is_number, stream
from trainer.report.views import views, write_views

if TYPE_CHECKING:
    from trainer.features.sweeps.jobs import Sweep

_TITLES = {"tokens_per_second": "tokens/s"}


def report(sweep: Sweep, console: Console) -> None:
    """Show the table of a sweep, best job first, and write `sweep.csv` and `sweep.png`.

    Where the sweep has no folder yet, nothing is written.
    """
    planned = [*map(by_key, sweep.jobs)]
    folders, typed = folders_and_words(sweep.folder, planned)
    # The keys that differ between jobs, in the order they were typed. A job that ran has recorded
    # its paths in full, so jobs are compared as they were planned, but where a search chose them.
    compared = planned or typed
    every = dict.fromkeys(chain(*compared))
    keys = [key for key in every if len({each.get(key) for each in compared}) > 1]
    rows = list[dict[str, Any]]()
    for number, (each, folder) in enumerate(zip(typed, folders, strict=True)):
        values = {key: each.get(key, "") for key in keys}
        rows.append({"job": number, **values, **_ended(folder)})
    # Jobs may have other metrics; what matters most comes first.
    names = dict.fromkeys(["rank", "job", *keys, sweep.metric, "state", *chain(*rows)])
    rows = _ranked([names | row for row in rows], sweep.metric, sweep.mode)
    if not rows:
        return
    left_out = _print_table(rows, keys, console)
    for note in _notes(rows, sweep.metric):
        console.print(note, markup=False, soft_wrap=True)
    if sweep.folder.is_dir():
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file_atomic(sweep.folder / "sweep.csv", text.getvalue().encode())
        files = [*(view.file for view in views().values()), "sweep.csv"]
        if _plot(sweep.folder, rows, keys, sweep.metric):
            files.append("sweep.png")
        write_views(sweep.folder)
        if left_out:
            console.print(f"columns that do not fit, in sweep.csv: {', '.join(left_out)}")
        console.print(f"[dim]{', '.join(files)} in[/] {sweep.folder}", soft_wrap=True)


def folders_and_words(
    sweep: Path, planned: Sequence[dict[str, str]]
) -> tuple[list[Path], list[dict[str, str]]]:
    """Give the folder of each job, and its overrides: as they ran, else as they were planned."""
    found = dict[int, Path]()
    for records in sweep.glob(f"*/{RunFolder.HYDRA}"):
        # A folder may be called by more than the number, as `hydra.sweep.subdir` says.
        if number := re.match(r"\d+", records.parent.name):
            found[int(number[0])] = records.parent
    # A search has no plan, so that only its folders tell how many jobs there were.
    numbers = range(max(len(planned), max(found, default=-1) + 1))
    folders = [found.get(each, sweep / str(each)) for each in numbers]
    typed = [by_key(RunFolder(folder).typed()) for folder in folders]
    both = zip_longest(typed, planned, fillvalue=dict[str, str]())
    return folders, [ran or plan for ran, plan in both]


def _notes(rows: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """Say why jobs did not complete, how to go on, and which metrics there are."""
    for row in rows:
        if row["reason"]:
            yield f"job {row['job']}: {row['reason']}"
    runs = [RunFolder(row["folder"]) for row in rows if row["folder"]]
    completed = [row for row in rows if row["state"] == saved_runs.COMPLETED]
    if any(row["state"] in (saved_runs.PREEMPTED, "not started") for row in rows):
        yield "to go on with the sweep, type the same command with resume=auto"
    if not is_comparable(metric, runs):
        yield f"{metric} is of other held-out samples or tokens in some jobs: ranks do not compare"
    if completed and rows[0]["rank"] is None:
        given = [name for name, value in completed[0].items() if "eval_" in name and value]
        there = f"evaluations gave {', '.join(given) or 'no finite figure'}"
        yield f"sweep.metric={metric}: no job has a number for it; {there}"


def _ranked(rows: list[dict[str, Any]], metric: str, mode: str) -> list[dict[str, Any]]:
    """Put the best job first; those that did not complete with the metric have no rank."""

    def key(row: Mapping[str, Any]) -> tuple[int, float]:
        return rank(row.get(metric), row["state"], is_max=mode == "max")

    rows.sort(key=key)
    for place, row in enumerate(rows, start=1):
        # The key of a job that completed with the metric begins with 0.
        row["rank"] = place if key(row)[0] == 0 else None
    return rows


def _ended(folder: Path) -> dict[str, Any]:
    """Give how a job ended by its records; it has none where it never started."""
    run = RunFolder(folder)
    status, ended = run.status(), run.record(RunFolder.END)
    # A job may fail before its run begins, which then writes no status.
    state = "failed" if ended else "not started"
    return {
        "state": str(ended.get("state") or status.get("state", state)),
        "exit_code": status.get("exit_code", ended.get("exit_code")),
        **last_figures(folder),
        "reason": status.get("reason") or ended.get("reason"),
        "folder": folder if folder.is_dir() else None,
    }


def _print_table(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], console: Console
) -> list[str]:
    """Print as many columns as fit, and return the titles of the others."""
    columns = [name for name in rows[0] if name not in ("exit_code", "folder", "reason")]
    wide, num_shown = console.options.update_width(10_000), len(columns)
    if not console.is_terminal:  # in a file there is room for all
        console.width = wide.max_width
    # At least what tells jobs apart, and which is best.
    for num_shown in range(len(columns), len(keys) + 3, -1):
        table = _table(rows, columns[:num_shown], keys)
        if console.measure(table, options=wide).maximum <= console.width:
            break
    console.print(_table(rows, columns[:num_shown], keys))
    return [*map(title_of, columns[num_shown:])]


def _table(rows: Sequence[Mapping[str, Any]], shown: Sequence[str], keys: Sequence[str]) -> Table:
    table = Table(title="sweep", title_justify="left", box=None, pad_edge=False)
    for name in shown:
        title = _TITLES.get(name, name).replace(".", ".\n").replace("eval_", "held-out\n")
        justify: Literal["left", "right"] = "right"
        if name == "state":
            justify = "left"
        no_wrap = name not in keys
        table.add_column(title, justify=justify, overflow="fold", no_wrap=no_wrap, min_width=4)
    for row in rows:
        cells = ["-" if row[name] is None else _short(row[name]) for name in shown]
        style = "bold green" if row["rank"] == 1 else ""
        table.add_row(*cells, style=style)
    return table


def _short(cell: object) -> str:
    """Write a figure, or a value that a search chose, with six digits."""
    text = show(cell)
    long = 10  # characters
    if isinstance(cell, float) or (len(text) > long and re.fullmatch(r"-?[\d.]+(e-?\d+)?", text)):
        return f"{float(text):,.6g}"
    return text


def _plot(
    folder: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], metric: str
) -> bool:
    """Draw the metric of each job, best first, by what differs; false where no job has any."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    values, labels = list[float](), list[str]()
    for row in rows:
        if row["rank"] is not None:
            # Jobs that were typed alike differ by their number alone.
            words = [f"{key}={_short(row[key])}" for key in keys or ["job"]]
            values.append(row[metric])
            labels.append("\n".join(words))
    # Inches: one for each job, so that labels have room
    figure = Figure(figsize=(max(7, len(values)), 4.2), layout="constrained")
    axes = figure.add_subplot(ylabel=title_of(metric))
    axes.plot(values, "o")
    axes.set_xticks(range(len(values)), labels, rotation=30, ha="right")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    write_file_atomic(folder / "sweep.png", image.getvalue())
    return bool(values)


def last_figures(folder: Path) -> dict[str, Any]:
    """Give a job's last figures: of training, then those of the held-out data.

    A job that did not come to its last step has those of its evaluations so far.
    """
    run = RunFolder(folder)
    result = run.record(RunFolder.RESULT)
    metrics = result.get("metrics", {})
    if not result:
        for entry in stream(folder / RunFolder.METRICS):
            for name, value in entry.items():
                if is_held_out(name):
                    metrics[name] = value
        metrics.pop(EVAL_SECONDS, None)
    # A file of a run is anybody's, so that its record may be no mapping.
    if not isinstance(metrics, dict):
        metrics = {}
    named = {figure_name(name): value for name, value in metrics.items() if is_number(value)}
    figures = {**named, "step": run.status().get("step"), **result}
    names = dict.fromkeys(["step", "loss", "eval_loss", *named, "tokens_per_second", "seconds"])
    return {name: figures.get(name) for name in names}


def value_of(folder: Path, metric: str) -> float | None:
    """Read a metric of a job; None where it gave none, or no number."""
    value = last_figures(folder).get(metric)
    return float(value) if is_number(value) else None
