"""Record per-rank progress in shared memory, readable after a crash.

A rank notes its step and phase on its board; what watches it reads the board to see that it hangs,
or where it was when it was killed. Writing takes about a microsecond and never waits.
"""

from __future__ import annotations

import math
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

FIRST_STEP = 10
"""How many times longer a place in the first step may take: it compiles and allocates."""

_PHASES: tuple[Phase, ...] = get_args(Phase)
_OUTSIDE: tuple[Phase, ...] = ("start", "evaluation", "saving", "end")
_LAYOUT = struct.Struct("<qqqqqqd")


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
        is_first: whether the step is the first one that this process takes.
        since: when it came there, by the machine's monotonic clock.
    """

    pid: int = 0
    step: int = 0
    phase: Phase = "start"
    micro_batch: int = 0
    waits: bool = False
    is_first: bool = False
    since: float = 0.0

    def limit_s(self, timeout_s: float) -> float:
        """Give the seconds that a rank may stay here; without end outside of steps.

        There one rank may tune, save or evaluate for long, and the others' collectives have their
        own, longer limit.

        Args:
            timeout_s: `parallel.timeout_s`.
        """
        if self.phase in _OUTSIDE:
            return math.inf
        return FIRST_STEP * timeout_s if self.is_first else timeout_s

    def is_overdue(self, timeout_s: float) -> bool:
        """Tell, on the machine of the rank, whether it has been here for longer than it may."""
        return time.monotonic() - self.since > self.limit_s(timeout_s)

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
        numbers = _LAYOUT.unpack_from(self._memory)
        pid, step, phase, micro_batch, waits, is_first, since = numbers
        return Place(
            pid=pid,
            step=step,
            phase=_PHASES[phase],
            micro_batch=micro_batch,
            waits=bool(waits),
            is_first=bool(is_first),
            since=since,
        )

    def write(self, place: Place) -> None:
        """Note where the rank is; `since` becomes now."""
        numbers = place.pid, place.step, _PHASES.index(place.phase), place.micro_batch
        flags = place.waits, place.is_first
        _LAYOUT.pack_into(self._memory, 0, *numbers, *flags, time.monotonic())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the rank waits for others; one that fails in it is left there."""
        self.write(replace(self.read(), waits=True))
        yield
        self.write(replace(self.read(), waits=False))

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
