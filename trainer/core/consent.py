"""Remember which runs this user made, in a file of their own that no run folder can write.

A line names a run's folder, the digest of its config, and the file that each of its packages comes
from. A run in another folder, with another config or with a package from another file is a
stranger's. Where the file cannot be written, every run is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.core.own_code import OWN_CODE


def note_start(run: Path, digest: str, packages: Iterable[str]) -> None:
    """Note that this user starts a run whose config has a digest, and classes of some packages."""
    line = {"run": os.path.realpath(run), "config": digest, "files": _files(packages)}
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        path = _path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def is_recorded(run: Path) -> bool:
    """Whether this user started a run in that folder."""
    return any(True for _ in _lines(run))


def is_unchanged(run: Path, digest: str, packages: Iterable[str]) -> bool:
    """Whether this user started that run, with that config, and packages from the same files."""
    files = _files(packages)
    return any((line.get("config"), line.get("files")) == (digest, files) for line in _lines(run))


def _files(packages: Iterable[str]) -> dict[str, str]:
    """Name the file that each package comes from; imports none."""
    return {package: OWN_CODE.file_of(package) for package in packages}


def _path() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "step-trainer" / "runs.jsonl"


def _lines(run: Path) -> Iterator[Mapping[str, Any]]:
    start = json.dumps({"run": os.path.realpath(run)})[:-1]
    with suppress(OSError, RuntimeError, ValueError), _path().open() as file:
        yield from (json.loads(line) for line in file if line.startswith(start))
