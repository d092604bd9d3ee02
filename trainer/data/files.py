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

from trainer.config.messages import did_you_mean_file, line
from trainer.core import signals
from trainer.core.errors import DataError
from trainer.core.format import plural
from trainer.core.rows import Row, join_parts, row
from trainer.core.run_folder import GRID_FILE, RunFolder

LONG_S = 1.0
"""Seconds of silence that need no explanation."""

OTHER, RUNS = "other file", "run folder"
"""What may be passed over."""
_OF_RUNS = frozenset({RunFolder.HYDRA, GRID_FILE, "sweep.csv"})
"""What a folder of a run, or of a sweep, has one of."""


@final
@dataclass
class Listing:
    """Files that were found, and what was passed over beside them."""

    files: list[Path] = field(default_factory=list)
    # How many, by what they are
    others: Counter[str] = field(default_factory=Counter)

    def describe(self) -> Sequence[Row]:
        """Say what was passed over."""
        text = join_parts(*(plural(count, noun) for noun, count in self.others.items()))
        if not text:
            return []
        return [row("", f"passed over: {text}", passed_over=self.others)]


def files_at(
    path: Path,
    takes: Callable[[Path], bool] = lambda _: True,
    kind: str = "files",
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
def progress(label: str) -> Iterator[Callable[[], None]]:
    """Say on stderr, once, what takes longer than `LONG_S`; only the first rank of a machine does.

    Yields a function to call after each unit of work, such as `indexing the standard library`; it
    raises `Preempted` once a signal has asked the run to stop.
    """
    due = math.inf
    if os.environ.get("LOCAL_RANK", "0") == "0":
        due = time.monotonic() + LONG_S

    def advance() -> None:
        nonlocal due
        signals.check()
        if time.monotonic() > due:
            due = math.inf
            # Stderr may be a closed pipe
            with suppress(OSError):
                sys.stderr.write(f"train: {label} ...\n")

    yield advance
