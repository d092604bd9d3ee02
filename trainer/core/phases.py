"""Add up the seconds that a rank spends in each phase of its steps.

Nothing is sent and nothing waited for: an entry costs a microsecond. On an accelerator kernels run
behind the host, so phases are marked on its stream and read when they have passed.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol, final

import torch

from trainer.core.rank_progress import Phase

WARM_STEP = 2
"""The first step that counts where there are so many: the one before fills caches and compiles."""

Mark = Any
"""A moment, as its clock has it."""


class Clock(Protocol):
    """Marks moments, and measures how far apart two of them are."""

    def mark(self) -> Mark:
        """Mark the present moment of the work that was launched so far."""

    def between(self, before: Mark, after: Mark) -> float | None:
        """Give the seconds between two marks; None while the later one lies ahead."""


@final
class HostClock:
    """The host's own time, for a device that computes while the host waits."""

    def mark(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def between(self, before: float, after: float) -> float:
        """See `Clock`."""
        return after - before


@final
class StreamClock:
    """The time of an accelerator's stream; where it idles counts to the phase it idles in."""

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float | None:
        """See `Clock`."""
        has_passed: bool = after.query()  # type: ignore[no-untyped-call]
        return before.elapsed_time(after) / 1e3 if has_passed else None


@final
class PhaseTimes:
    """Adds up what each phase of a rank's steps takes. A step begins with the phase `data`.

    Args:
        clock: of the device that computes.

    Attributes:
        phase: the present one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.phase: Phase = "start"
        self._since = clock.mark()
        self._ahead: deque[tuple[Phase, Mark, Mark]] = deque()
        self._flights: deque[tuple[int, Mark, Mark, Mark]] = deque()
        self._landed: Mark = None
        self._flown_step = 0
        self._phases: dict[Phase, dict[str, float]] = {}
        self._in_flight = self._waited = 0.0
        self._begun = self._steps = 0

    def enter(self, phase: Phase) -> Phase:
        """End the present phase, begin another, and return the one that ended."""
        now, ended = self._clock.mark(), self.phase
        self._ahead.append((ended, self._since, now))
        self.phase, self._since = phase, now
        if phase == "data":
            self._begun += 1
            self._add_up()
        return ended

    def mark(self) -> Mark:
        """Mark the present moment."""
        return self._clock.mark()

    def flew(self, launched: Mark, asked: Mark) -> None:
        """Count a collective that has landed, in order of launch.

        One that had landed before anyone asked for it counts as on its way until then.

        Args:
            launched: when it began to travel.
            asked: since when nothing but its end was waited for.
        """
        self._flights.append((self._begun, launched, asked, self._clock.mark()))

    def spending(self) -> dict[str, Any]:
        """Give what the steps so far took, the present phase left out, as JSON has it.

        Returns:
            `steps` counted; `phases`, by name `seconds` in all, `times` entered and `least`, the
            seconds of the shortest; `in_flight`, seconds in which at least one collective
            travelled, and `waited`, those in which nothing else was done meanwhile.
        """
        self._add_up()
        return {
            "steps": max(1, self._steps - 1),
            "phases": {name: dict(spent) for name, spent in self._phases.items()},
            "in_flight": self._in_flight,
            "waited": self._waited,
        }

    def _add_up(self) -> None:
        """Add what has passed."""
        self._add_up_flights()
        while self._ahead:
            phase, before, after = self._ahead[0]
            seconds = self._clock.between(before, after)
            if seconds is None:
                return
            self._ahead.popleft()
            if phase == "data":
                self._steps += 1
                if self._steps <= WARM_STEP:
                    self._phases = {}
            new = {"seconds": 0.0, "times": 0, "least": seconds}
            spent = self._phases.setdefault(phase, new)
            spent["seconds"] += seconds
            spent["times"] += 1
            spent["least"] = min(spent["least"], seconds)

    def _add_up_flights(self) -> None:
        """Add what has landed; time in which several travelled counts once."""
        between = self._clock.between
        while self._flights:
            step, launched, asked, landed = self._flights[0]
            travelled, waited = between(launched, landed), between(asked, landed)
            if travelled is None or waited is None:
                return
            self._flights.popleft()
            if self._flown_step < step <= WARM_STEP:
                self._in_flight = self._waited = 0.0
            self._flown_step = step
            if self._landed is not None:
                travelled = min(travelled, between(self._landed, landed) or 0.0)
            self._in_flight += travelled
            self._waited += waited
            self._landed = landed


def clock_of(device: torch.device) -> Clock:
    """Choose the clock of a device."""
    return StreamClock() if device.type == "cuda" else HostClock()
