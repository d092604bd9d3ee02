"""Note what a rank is doing, and what each phase has taken.

Its supervisor reads the former, after a crash too. Writing takes a microsecond and never waits.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final, get_args

InStep = Literal["data", "normalizer", "compute", "gather", "agree", "reduce", "update", "report"]
Phase = Literal["start", InStep, "evaluation", "saving", "end"]
"""What a rank can be at, in order: one that gathers waits for those that still compute."""

FIRST_STEP = 10
"""How many times longer a place in the first step may take: it compiles and allocates."""

_IN_STEP: tuple[InStep, ...] = get_args(InStep)
_PHASES: tuple[Phase, ...] = get_args(Phase)
_PLACE, _SINCE = struct.Struct("<qqq??"), struct.Struct("<d")
# Aligned, so that no reader finds half of one.
_SINCE_AT, _STEP_SINCE_AT = 32, 40

WARM_STEP = 2
"""The first step that counts where there are so many: the one before fills caches and compiles."""

Mark = Any  # a moment: seconds of the host's clock, or an event on the device's stream


@final
@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is."""

    step: int = 0  # of the optimizer, from 1; 0 before the first
    phase: Phase = "start"
    micro_batch: int = 0  # the one it computes, from 1; 0 outside of `compute`
    waits: bool = False  # in a collective, for other ranks
    is_first: bool = False  # the first step that this process takes, or one that may compile
    since: float = 0.0  # when it came there, by the machine's monotonic clock
    step_since: float = 0.0  # when it came to this step, in seconds since the epoch

    @property
    def progress(self) -> tuple[int, int]:
        """Step and phase by number; ranks meet in every step, so one that hangs is behind."""
        return self.step, _PHASES.index(self.phase)

    def limit_s(self, timeout_s: float) -> float:
        """Give the seconds that a rank may stay here, by `parallel.timeout_s`."""
        # One may tune, save or evaluate for long; the others' collectives have a longer limit.
        if self.phase not in _IN_STEP:
            return math.inf
        return FIRST_STEP * timeout_s if self.is_first else timeout_s

    def __str__(self) -> str:
        """Write it in words."""
        at = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step} ({self.phase}{at})" if self.step else f"the {self.phase}"


@final
class RankProgress:
    """Memory in which one rank notes its place: a file's, or of this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        size = _STEP_SINCE_AT + _SINCE.size
        self._memory: bytearray | mmap.mmap = bytearray(size)
        if path is None:
            return
        with path.open("a+b") as file:
            # In full: a page that finds no room on the disk later would kill whoever writes to it.
            file.write(bytes(max(0, size - file.seek(0, os.SEEK_END))))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), size)

    def read(self) -> RankPosition:
        """Read where the rank is."""
        # The time last, which is written first: nobody is taken to have come to a place long ago.
        step, phase, *others = _PLACE.unpack_from(self._memory)
        since = _SINCE.unpack_from(self._memory, _SINCE_AT)
        step_since = _SINCE.unpack_from(self._memory, _STEP_SINCE_AT)
        return RankPosition(step, _PHASES[phase], *others, *since, *step_since)

    def write(self, place: RankPosition) -> None:
        """Note where the rank is; `since` becomes now."""
        phase = _PHASES.index(place.phase)
        self._write(place.step, phase, place.micro_batch, place.waits, place.is_first)

    def next_micro_batch(self) -> None:
        """Note that the rank begins the next micro-batch."""
        step, phase, micro_batch, *rest = _PLACE.unpack_from(self._memory)
        self._write(step, phase, micro_batch + 1, *rest)

    def _write(self, *place: int) -> None:
        """Copy bytes over what is there; `pack_into` writes zeros first, which a reader may see."""
        self._memory[_SINCE_AT:_STEP_SINCE_AT] = _SINCE.pack(time.monotonic())
        if place[0] != _PLACE.unpack_from(self._memory)[0]:
            self._memory[_STEP_SINCE_AT:] = _SINCE.pack(time.time())
        self._memory[: _PLACE.size] = _PLACE.pack(*place)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the rank waits for others; one that fails in it is left there."""
        self.write(replace(self.read(), waits=True))
        yield
        self.write(replace(self.read(), waits=False))


@final
class PhaseTimes:
    """Adds up what each phase of a rank's steps takes. A step begins with the phase `data`.

    Nothing is sent and nothing waited for: an entry costs a microsecond. On an accelerator kernels
    run behind the host, so phases are marked on its stream and read when they have passed; where it
    idles counts to the phase it idles in. `mark` marks the present moment of the work that was
    launched so far.
    """

    # Called with every phase that begins; None calls nothing
    on_phase: Callable[[Phase], None] | None = None

    def __init__(self, mark: Callable[[], Mark] = time.perf_counter) -> None:
        self.mark = mark
        self.phase: Phase = "start"
        self._since = mark()
        # In the order of their ends.
        self._passing: deque[tuple[Phase, Mark, Mark]] = deque()
        self._phases: dict[Phase, dict[str, float]] = {}
        self._steps = 0

    def enter(self, phase: Phase) -> Phase:
        """End the present phase, begin another, and return the one that ended."""
        now, ended = self.mark(), self.phase
        self._passing.append((ended, self._since, now))
        self.phase, self._since = phase, now
        if phase == "data":
            self._add_up()
        if self.on_phase is not None:
            self.on_phase(phase)
            # What it took is no part of the phase.
            self._since = self.mark()
        return ended

    def spending(self) -> dict[str, Any]:
        """Give what the steps so far took, the present phase left out, as JSON has it.

        Gives `steps` counted, and `phases`, by name `seconds` in all, `times` entered and `least`,
        the seconds of the shortest.
        """
        self._add_up()
        return {
            "steps": max(1, self._steps - 1),
            "phases": {name: dict(spent) for name, spent in self._phases.items()},
        }

    def _add_up(self) -> None:
        while self._passing:
            phase, before, after = self._passing[0]
            if isinstance(after, float):
                seconds = after - before
            elif after.query():
                seconds = before.elapsed_time(after) / 1e3
            else:
                # The device has not come there yet, nor to any mark behind it.
                return
            self._passing.popleft()
            if phase == "data":
                self._steps += 1
                if self._steps <= WARM_STEP:
                    self._phases = {}
            new = {"seconds": 0.0, "times": 0, "least": seconds}
            spent = self._phases.setdefault(phase, new)
            spent["seconds"] += seconds
            spent["times"] += 1
            spent["least"] = min(spent["least"], seconds)
