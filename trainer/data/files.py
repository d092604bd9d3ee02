"""Find the files behind `data.path`, refuse what cannot be read, and show that a read is long."""

from __future__ import annotations

import lzma
import math
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.config.messages import did_you_mean_file, line
from trainer.core import signals
from trainer.core.errors import DataError
from trainer.core.format import plural
from trainer.core.rows import Row, join_parts, row
from trainer.core.run_folder import GRID_FILE, RunFolder

LONG_S = 1.0
"""Seconds of silence that need no explanation."""
REDRAWN_S = 0.1
"""Seconds between two looks of a bar."""

OTHER, RUNS = "other file", "run folder"
"""What may be passed over."""
_OF_RUNS = frozenset({RunFolder.HYDRA, GRID_FILE, "sweep.csv"})
"""What a folder of a run, or of a sweep, has one of."""


@final
@dataclass
class Listing:
    """Files that were found, and what was passed over beside them."""

    files: list[Path] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # how many, by what they are

    def describe(self) -> Sequence[Row]:
        """Say what was passed over."""
        text = join_parts(*(plural(count, noun) for noun, count in self.others.items()))
        if not text:
            return []
        return [row("", f"passed over: {text}", passed_over=self.others)]


def files_at(
    path: Path, takes: Callable[[Path], bool] = lambda _: True, kind: str = "files"
) -> Listing:
    """List one file, or the files of a folder and its subfolders in order of their names.

    Names that begin with a dot are left out. Folders of runs and sweeps below it are passed over,
    and files that `takes` refuses; `kind` says what is taken. A DataError where there is no file,
    or something else than files and folders.
    """
    if path.is_file():
        return Listing([path])
    if not path.is_dir():
        meant = did_you_mean_file(str(path))
        text = f"no such file or folder{meant and f'.{meant}'}"
        raise DataError(line("data.path", str(path), text))
    found, num_runs = _walk(path)
    if not found and not num_runs:
        raise DataError(f"data.path={path}: the folder holds no {kind}")
    listing = Listing()
    for file in sorted(found):
        if takes(file):
            listing.files.append(file)
        elif file.suffix:
            listing.others[f"{file.suffix} file"] += 1
        else:
            listing.others[OTHER] += 1
    # Adding leaves out what is zero.
    listing.others += Counter({RUNS: num_runs})
    return listing


def _walk(path: Path) -> tuple[list[Path], int]:
    """Find the files below a folder, but of runs and sweeps, of which it gives the number."""
    found, num_runs = list[Path](), 0
    for parent, folders, files in os.walk(path, onerror=_refuse):
        if Path(parent) != path and not _OF_RUNS.isdisjoint((*folders, *files)):
            num_runs += 1
            folders.clear()
            continue
        for name in [*folders]:
            if name.startswith("."):
                folders.remove(name)  # which `walk` then leaves out
            elif Path(parent, name).is_symlink():
                # `walk` follows no link to a folder; it is refused below, not passed over.
                found.append(Path(parent, name))
        for name in files:
            if not name.startswith("."):
                found.append(Path(parent, name))
    for file in found:
        if not file.is_file():
            raise DataError(
                f"data: {file}: not a regular file; remove it, or begin its name with a dot"
            )
    return found, num_runs


def _refuse(error: OSError) -> None:
    raise error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a DataError that names the file, which cannot be read, or not be unpacked."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        name = getattr(error, "filename", None) or path
        raise DataError(f"data: cannot read {name}: {why}") from error


@contextmanager
def progress(label: str, total: int = 0, noun: str = "sample") -> Iterator[Callable[[], None]]:
    """Show on stderr what takes longer than `LONG_S`; only the first rank of a machine does.

    That is a bar on a terminal where there are so many units of work, such as 57 records of
    `tokenising chat.jsonl`, and one line anywhere else. Yields a function to call after each unit;
    it raises `Preempted` once a signal has asked the run to stop.
    """
    due, done, of_all = math.inf, 0, label
    if os.environ.get("LOCAL_RANK", "0") == "0":
        due = time.monotonic() + LONG_S
    if total:
        of_all = f"{label}, {plural(total, noun)}"
    bar: Progress | None = None

    def advance() -> None:
        nonlocal due, done, bar
        signals.check()
        done += 1
        if time.monotonic() < due:
            return
        if bar is None and total:
            bar = _started_bar(label, total, noun)
        if bar is not None:
            due = time.monotonic() + REDRAWN_S
            bar.update(bar.task_ids[0], completed=done, refresh=True)
        else:
            due = math.inf
            # Stderr may be a closed pipe
            with suppress(OSError):
                sys.stderr.write(f"train: {of_all} ...\n")

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def _started_bar(label: str, total: int, noun: str) -> Progress | None:
    """Draw a bar of so many units on the terminal; None where stderr is none."""
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_interactive):
        return None
    # No thread draws it: processes may be forked meanwhile.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,}", markup=False),
        TextColumn(f"{noun}s", markup=False),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    bar.add_task(label, total=total)
    bar.start()
    # A killed process cannot show a hidden cursor again.
    console.show_cursor(show=True)
    return bar
