"""Find the files behind `data.path`, refuse what cannot be read, and show that a read is long."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.core import signals
from trainer.core.errors import DataError

LONG_S = 1.0
"""Seconds of silence that need no explanation."""


def files_at(path: Path, suffix: str = "") -> list[Path]:
    """List one file, or the files of a folder and its subfolders in order of their names.

    Names that begin with a dot are left out; of others a `suffix` takes its own.

    Raises:
        DataError: there is no such file, or something else (a pipe, a device, a link to a folder
            or to nothing).
        OSError: a folder cannot be read.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"data.path={path}: no such file or folder")
    found = []
    for parent, folders, files in os.walk(path, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        found += [Path(parent, name) for name in (*links, *files) if not name.startswith(".")]
    for file in found:
        if not file.is_file():
            raise DataError(
                f"data: {file}: not a regular file; remove it, or begin its name with a dot"
            )
    if not (found := [file for file in found if suffix in {"", file.suffix}]):
        raise DataError(f"data.path={path}: the folder holds no {f'{suffix} ' * bool(suffix)}files")
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a DataError that names the file in place of an OSError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"data: cannot read {error.filename or path}: {why}") from error


@contextmanager
def progress(label: str) -> Iterator[Callable[[], None]]:
    """Say on stderr, once, what takes longer than `LONG_S`; only the first rank of a machine does.

    Args:
        label: what is being done, e.g. `indexing the standard library`.

    Yields:
        A function to call after each unit of work; it raises `Preempted` once a signal has asked
        the run to stop.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    due = time.monotonic() + LONG_S if is_first else math.inf

    def advance() -> None:
        nonlocal due
        signals.check()
        if time.monotonic() > due:
            due = math.inf
            with suppress(OSError):  # stderr may be a closed pipe
                sys.stderr.write(f"train: {label} ...\n")

    yield advance
