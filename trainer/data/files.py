"""Find the files behind `data.path`, name those that cannot be read, and show progress."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from trainer.core import signals
from trainer.core.errors import DataError

LONG_S = 1.0
"""Seconds of silence that need no explanation."""


def files_at(path: Path) -> list[Path]:
    """List one file, or the files of a folder and its subfolders in order of their names.

    Names that begin with a dot are left out, and nothing else is left out in silence.

    Raises:
        DataError: there is nothing, or something else (a pipe, a socket, a device, a link to a
            folder or to nothing), or a folder cannot be read.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        what = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise DataError(f"data.path={path}: {what}")
    return sorted(_files(path))


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.name.startswith(".") or (path.is_dir() and not path.is_symlink()):
                continue
            if not path.is_file():
                kind = "a link to a folder" if path.is_dir() else "neither a file nor a folder"
                raise DataError(
                    f"data: {path}: {kind}, which is not read; remove it, or begin its name with "
                    "a dot"
                )
            yield path


def _refuse(error: OSError) -> None:
    raise DataError(f"data: cannot read {error.filename}: {error.strerror}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a data error that names the file.

    Raises:
        DataError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror or error}") from error


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr how far a long read has come; only the first rank of a machine does.

    On a terminal that is a bar, elsewhere one plain line once the read has taken `LONG_S`.

    Args:
        label: what is being done, e.g. `indexing the standard library`.
        total: units of work.

    Yields:
        A function to call with the units of work just finished; it raises `Preempted` once a
        signal has asked the run to stop.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    due = time.monotonic() + LONG_S if is_first else math.inf
    with _bar(label, total) if is_first and sys.stderr.isatty() else nullcontext() as bar:

        def advance(amount: int) -> None:
            nonlocal due
            signals.check()
            if bar is not None:
                bar(amount)
            elif time.monotonic() > due:
                due = math.inf
                with suppress(OSError):  # stderr may be a closed pipe
                    sys.stderr.write(f"train: {label} ...\n")

        yield advance


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    # Only a terminal pays for the import, some 50 ms.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)
