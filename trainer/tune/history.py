"""Remember how well runs on this machine were predicted, and how much memory they took beyond.

Each run that ends adds a line to a file beside the tuning cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from pydantic import Field, TypeAdapter, ValidationError

from trainer.core import durable
from trainer.core.urls import cache_folder

MOST_BYTES = 2**20  # of the file; its older half is dropped then
# A smaller prediction says less than the rest of a process takes
LEAST_COUNTED = 2**28
LEAST_RUNS, LAST_RUNS = 5, 20  # that an excess is taken from

_Bytes = Annotated[int, Field(ge=0)] | None


@final
@dataclass(frozen=True, kw_only=True)
class PastRun:
    """What was predicted of a run, and what it took; None where nobody knows."""

    ended: str  # as `2026-05-01 12:30`
    folder: str  # its name
    device: str  # the name of the card or processor
    steps: int  # of the process that ended
    predicted_bytes: _Bytes = None
    measured_bytes: _Bytes = None
    # What a limit counts for the prediction, and what the device gave in the end: both with what
    # allocators take
    counted_bytes: _Bytes = None
    taken_bytes: _Bytes = None
    predicted_seconds: float | None = None  # of a step
    measured_seconds: float | None = None


_LINE = TypeAdapter(PastRun)


def history_file() -> Path:
    """Name the file of this machine and user."""
    return cache_folder() / "tune" / "history.jsonl"


def add(run: PastRun) -> None:
    """Add a run. A file that cannot be written is no failure."""
    file = history_file()
    with suppress(OSError):
        durable.make_own_folder(file.parent)
        if file.exists() and file.stat().st_size > MOST_BYTES:
            lines = file.read_bytes().splitlines(keepends=True)
            durable.write_file_atomic(file, b"".join(lines[len(lines) // 2 :]))
        durable.append(file, _LINE.dump_json(run) + b"\n")


def past_runs(device: str | None = None) -> Sequence[PastRun]:
    """Give the runs of this machine, or of one device, the oldest first; no damaged line."""
    found = list[PastRun]()
    with suppress(OSError):
        for line in history_file().read_bytes().splitlines():
            with suppress(ValidationError):
                run = _LINE.validate_json(line)
                if device in {None, run.device}:
                    found.append(run)
    return found


def excess_of(device: str) -> tuple[float, int] | None:
    """Give the largest share by which runs took more than was counted, and how many runs tell.

    None where fewer than `LEAST_RUNS` took enough memory to tell. The last `LAST_RUNS` count.
    """
    shares = list[float]()
    for run in past_runs(device):
        if run.taken_bytes and run.counted_bytes and run.counted_bytes >= LEAST_COUNTED:
            shares.append(run.taken_bytes / run.counted_bytes - 1)
    last = shares[-LAST_RUNS:]
    return (max(last), len(last)) if len(last) >= LEAST_RUNS else None
