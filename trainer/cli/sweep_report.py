"""Report a sweep at its end: one table of its jobs, on screen and as CSV, and a plot of it.

Everything is read from the job folders, so it does not matter which launcher or process ran a
job, or whether the sweep was stopped half-way.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from trainer.checkpoint.status import read_status
from trainer.cli.saved_runs import COMPLETED
from trainer.core import durable
from trainer.core.format import duration

_MEASURED = ("step", "loss", "eval_loss", "tokens_per_second", "seconds")
_WHOLE = 1000
"""From which number on the decimals of a figure say nothing."""


def report(folder: Path, planned: Sequence[Sequence[str]], console: Console) -> bool:
    """Show the table of a sweep, and write `sweep.csv` and, with matplotlib, `sweep.png`.

    Args:
        folder: the sweep folder; nothing is written if it does not exist.
        planned: overrides of the jobs that were to run; none where the sweeper chooses as it goes.
        console: where the table goes.

    Returns:
        Whether every job is completed.
    """
    folders = [path.parent for path in folder.glob("*/.hydra")]
    found = {int(n[0]): path for path in folders if (n := re.match(r"\d+", path.name))}
    count = max([len(planned), *(number + 1 for number in found)])
    typed = [_overrides(found.get(n), planned[n] if n < len(planned) else ()) for n in range(count)]
    # The keys that differ between jobs, in the order they were typed.
    keys = list(dict.fromkeys(key for each in typed for key in each))
    keys = [key for key in keys if len({each.get(key) for each in typed}) > 1]
    rows = [
        {"job": n, **{key: each.get(key, "") for key in keys}, **_ended(found.get(n))}
        for n, each in enumerate(typed)
    ]
    if rows:
        console.print(_table(rows))
    if rows and folder.is_dir():
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        durable.write_file_atomic(folder / "sweep.csv", text.getvalue().encode())
        names = "sweep.csv and sweep.png" if _plot(folder, rows, keys) else "sweep.csv"
        console.print(f"[dim]{names} in[/] {folder}", soft_wrap=True)
    return all(row["state"] == COMPLETED for row in rows)


def describe_end(folder: Path) -> str:
    """Say in a few words what became of a job; its train.log says it in full."""
    end = _ended(folder)
    code = f", exit code {end['exit_code']}" if end["exit_code"] else ""
    loss = f", held-out loss {end['eval_loss']:.4f}" if end["eval_loss"] else ""
    took = f", {duration(end['seconds'])}" if end["seconds"] else ""
    return f"{end['state']}{code}, step {end['step'] or 0}{loss}{took}"


def _overrides(folder: Path | None, planned: Sequence[str]) -> dict[str, str]:
    """Give what a job ran with, or is to run with, by dotted key."""
    record = None if folder is None else folder / ".hydra" / "overrides.yaml"
    typed = yaml.safe_load(record.read_text()) if record and record.is_file() else None
    pairs = (line.lstrip("+").partition("=") for line in typed or planned)
    return {key.replace("/", "."): value for key, _, value in pairs}


def _ended(folder: Path | None) -> dict[str, Any]:
    """Give how a job ended by its records; a `None` folder is of a job that never started."""
    status = {} if folder is None else read_status(folder)
    result = {} if folder is None else durable.read_json(folder / "result.json")
    state = "not started" if folder is None else str(status.get("state", "failed"))
    figures = {"step": status.get("step"), **result}
    return {
        "state": state,
        "exit_code": status.get("exit_code"),
        **{name: figures.get(name) for name in _MEASURED},
        "folder": folder,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="sweep", title_justify="left", box=None, pad_edge=False)
    shown = [name for name in rows[0] if name not in ("exit_code", "folder")]
    for name in shown:
        title = name.replace("eval_loss", "held-out\nloss").replace(".", ".\n")
        table.add_column(title, justify="left" if name == "state" else "right", no_wrap=True)
    losses = [_loss(row) if row["state"] == COMPLETED else math.inf for row in rows]
    best = min(losses)
    for row, loss in zip(rows, losses, strict=True):
        style = "" if row["state"] == COMPLETED else "red"
        style = "bold green" if loss == best < math.inf else style
        table.add_row(*(_figure(row[name]) for name in shown), style=style)
    return table


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.4f}"
    return "-" if value is None else str(value)


def _loss(row: Mapping[str, Any]) -> float:
    value = row["eval_loss"]
    return float(value) if isinstance(value, int | float) else math.inf


def _plot(folder: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> bool:
    """Draw the held-out loss over the first swept key, if there is any, and matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        return False
    lines: dict[str, list[tuple[Any, float]]] = {}
    key, *others = keys or ["job"]
    try:
        places = [float(row[key]) for row in rows]
    except ValueError:  # words, which matplotlib puts side by side
        places = [str(row[key]) for row in rows]  # type: ignore[misc]
    for place, row in zip(places, rows, strict=True):
        if math.isfinite(_loss(row)):
            label = " ".join(f"{other}={row[other]}" for other in others)
            lines.setdefault(label, []).append((place, _loss(row)))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel=key, ylabel="held-out loss")
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=label, alpha=0.7)
    if others and lines:
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144)
    durable.write_file_atomic(folder / "sweep.png", image.getvalue())
    return bool(lines)
