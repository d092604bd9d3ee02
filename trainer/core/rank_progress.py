"""Where each rank is, in a few bytes of shared memory, legible even when the rank cannot speak.

A rank notes its step and phase on its board; whoever started the ranks reads the boards when one
of them was killed or hangs. Writing takes about a microsecond and never waits.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final, get_args

Phase = Literal[
    "start",
    "data",
    "weigh",
    "gather",
    "compute",
    "agree",
    "reduce",
    "update",
    "report",
    "evaluation",
    "saving",
    "end",
]
"""What a rank can be at; a step goes from `data` to `report`."""

_PHASES: tuple[Phase, ...] = get_args(Phase)
_LAYOUT = struct.Struct("<qqqqqd")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Attributes:
        pid: its process; 0 while it has not begun to listen to signals.
        step: optimizer step it works on, from 1; 0 before the first.
        phase: of the step.
        micro_batch: the one it computes, from 1; 0 outside of `compute`.
        waits: whether it waits, outside of a step, for what another rank does alone.
        since: when it came there, by the machine's monotonic clock.
    """

    pid: int = 0
    step: int = 0
    phase: Phase = "start"
    micro_batch: int = 0
    waits: bool = False
    since: float = 0.0

    def __str__(self) -> str:
        """Say it in words."""
        at = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step} ({self.phase}{at})" if self.step else f"the {self.phase}"


@final
class Board:
    """One rank's board.

    Args:
        path: of its file; made when it is missing. None is memory of this process alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _LAYOUT.size)
            return
        with path.open("a+b") as file:
            # In full: a page that finds no room on the disk later would kill whoever writes to it.
            file.write(bytes(max(0, _LAYOUT.size - file.seek(0, os.SEEK_END))))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def read(self) -> Place:
        """Tell where the rank is."""
        pid, step, phase, micro_batch, waits, since = _LAYOUT.unpack_from(self._memory)
        return Place(
            pid=pid,
            step=step,
            phase=_PHASES[phase],
            micro_batch=micro_batch,
            waits=bool(waits),
            since=since,
        )

    def write(self, place: Place) -> None:
        """Note where the rank is; `since` becomes now."""
        numbers = place.pid, place.step, _PHASES.index(place.phase), place.micro_batch
        _LAYOUT.pack_into(self._memory, 0, *numbers, place.waits, time.monotonic())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the rank waits for others; one that fails in it is left there.

        Yields:
            Nothing.
        """
        self.write(replace(self.read(), waits=True))
        yield
        self.write(replace(self.read(), waits=False))

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
