"""The files behind `data.path`: all of them, or a line that says what is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.core.errors import DataError


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
                    f"data: {path}: {kind}, which is not read: take it away, put files there, or "
                    "give it a name that begins with a dot"
                )
            yield path


def _refuse(error: OSError) -> None:
    raise DataError(f"data: cannot read {error.filename}: {error.strerror}") from error
