"""Gather how a run went: its figures, how it ended, what is worth knowing, simple models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from trainer.config.secrets import without_secrets
from trainer.core.format import loss, number, short, size
from trainer.core.run_folder import RunFolder
from trainer.features.page.saved_run import SavedRun, as_list, as_mapping, numbers_of
from trainer.report.journal import is_number

_MOST_LETTERS, _LAST_LINES = 100_000, 12  # of a traceback, and of what of it is seen at once

TableRows = Sequence[Sequence[str]]
Tile = tuple[str, str, str | None]
"""A name, a value, and a note."""


def ending(run: SavedRun) -> str | None:
    """Say why it ended."""
    if not (reason := run.status.get("reason") or run.result.get("stopped")):
        return None
    if code := run.status.get("exit_code"):
        reason = f"exit {code}: {reason}"
    return without_secrets(str(reason), os.environ)


def traceback(run: SavedRun) -> tuple[str, str]:
    """Give the traceback of a run that failed, of the first rank that left one: its end, and all.

    The second is empty where the first is all of it.
    """
    whole = ""
    if run.state == "failed":
        files = sorted((run.folder / RunFolder.ERRORS).glob("rank*.txt"))
        with suppress(OSError):
            for file in filter(Path.is_file, files[:1]):
                with file.open(errors="replace") as opened:
                    whole = without_secrets(opened.read(_MOST_LETTERS), os.environ)
    lines = whole.strip("\n").split("\n")
    if len(lines) <= _LAST_LINES:
        return whole, ""
    return "\n".join(lines[-_LAST_LINES:]), whole


def figures(run: SavedRun) -> list[Tile]:
    """Give the figures that a person looks for first."""
    tiles = list[Tile]()
    if (held_out := run.last("eval_loss")) is not None:
        note = None
        if best := run.best():
            note = f"best {loss(best[0])} at step {number(best[1])}"
        tiles.append(("held-out loss", loss(held_out), note))
    tiles += _metrics(run)
    if (trained := run.last("loss")) is not None:
        tiles.append(("training loss", loss(trained), None))
    note = None
    if planned := numbers_of(run.plan).get("steps"):
        note = f"of {number(planned)} planned"
    tiles.append(("steps", number(run.last_step), note))
    name = "tokens_per_second"
    if speed := numbers_of(run.result).get(name) or run.last(name):
        tiles.append((f"{run.noun}s per second", short(speed), None))
    if peak := run.peak_bytes():
        tiles.append(("peak memory", size(peak), None))
    if count := sum("skipped" in entry for entry in run.steps):
        tiles.append(("skipped steps", number(count), "without an update"))
    if count := sum("replays" in entry for entry in run.steps):
        tiles.append(("replays", number(count), "after memory ran out"))
    return tiles


def _metrics(run: SavedRun) -> Iterator[Tile]:
    """Give the last evaluation's other figures, at most three, and the best of what is followed."""
    last = dict[str, float]()
    if run.evaluations:
        last = numbers_of(run.evaluations[-1])
    for name in ("step", "eval_loss", "eval_seconds"):
        last.pop(name, None)
    for name in islice(last, 3):
        yield name.removeprefix("eval_").replace("_", " "), f"{run.last(name):.4g}", None
    found = as_mapping(run.result.get("best"))
    name, value = str(found.get("metric")).removeprefix("eval_"), found.get("value")
    # The held-out loss has its best beside it.
    if is_number(value) and name != "loss":
        yield f"best {name.replace('_', ' ')}", f"{value:.4g}", f"at step {found.get('step')}"


def notes(run: SavedRun) -> list[tuple[str, str]]:
    """List warnings of the plan, where a run lost time, and what its noise says of the batch."""
    records = {"warning": run.plan.get("warnings"), "time": run.result.get("advice")}
    records["noise"] = [run.result.get("batch_advice")]
    found = list[tuple[str, str]]()
    for kind, record in records.items():
        for text in as_list(record):
            if isinstance(text, str):
                found.append((kind, text))
    return found


def baselines(run: SavedRun) -> TableRows:
    """Set the held-out loss beside those of simple models."""
    own, others = run.result.get("eval_loss"), numbers_of(run.result.get("baselines"))
    if not others or not is_number(own):
        return []
    rows = [("this run", loss(own), "")]
    for name, value in others.items():
        verdict = "better" if own <= value else "worse"
        rows.append((name, loss(value), f"{abs(value - own):.4f} {verdict}"))
    return rows
