"""Seconds a rank spends in each phase of its steps, added up where one phase gives way to the next.

Nothing is sent and nothing waited for: an entry costs a microsecond. On an accelerator kernels run
behind the host, so phases are marked on its stream and read when they have passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, final

import torch

from trainer.core.rank_progress import Phase

WARM = 2
"""The first step that counts where there are so many."""


class Clock(Protocol):
    """Marks moments, and tells how far apart two of them are."""

    def mark(self) -> Any:  # noqa: ANN401 - what a moment is, only its clock knows
        """Mark the present moment of the work that was launched so far."""

    def between(self, before: Any, after: Any) -> float | None:  # noqa: ANN401
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
@dataclass(slots=True)
class Spent:
    """What one phase took.

    Attributes:
        seconds: in all.
        times: how often it was entered.
        least: seconds of the shortest.
    """

    seconds: float = 0.0
    times: int = 0
    least: float = float("inf")

    def add(self, seconds: float) -> None:
        """Count it once more."""
        self.seconds += seconds
        self.times += 1
        self.least = min(self.least, seconds)


@final
@dataclass(frozen=True, kw_only=True)
class Spending:
    """What the phases of some steps took on one rank.

    Attributes:
        steps: counted.
        phases: by name; those never entered are missing.
        in_flight: seconds in which at least one collective travelled.
        waited: seconds in which nothing else was done meanwhile.
    """

    steps: int
    phases: Mapping[Phase, Spent]
    in_flight: float = 0.0
    waited: float = 0.0

    def seconds(self, *phases: Phase) -> float:
        """Give the seconds of some phases together."""
        return sum(self.phases[phase].seconds for phase in phases if phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        """Give what `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Take what `to_json` gave."""
        phases = {phase: Spent(**spent) for phase, spent in told["phases"].items()}
        return cls(**{**told, "phases": phases})


@final
class PhaseTimes:
    """Adds up what each phase of a rank's steps takes.

    A step begins with the phase `data`. The first one warms caches, allocators and compilers up,
    and counts only in a run that has no second.

    Args:
        clock: of the device that computes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.phase: Phase = "start"
        self._since = clock.mark()
        self._ahead: deque[tuple[Phase, Any, Any]] = deque()
        self._flights: deque[tuple[int, Any, Any, Any]] = deque()
        self._landed: Any = None
        self._flown_step = 0
        self._spent: dict[Phase, Spent] = {}
        self._in_flight = self._waited = 0.0
        self._begun = self._steps = 0

    def enter(self, phase: Phase) -> Phase:
        """End the present phase, and begin another.

        Returns:
            The one that ended.
        """
        now, ended = self._clock.mark(), self.phase
        self._ahead.append((ended, self._since, now))
        self.phase, self._since = phase, now
        if phase == "data":
            self._begun += 1
            self._settle()
        return ended

    def mark(self) -> Any:  # noqa: ANN401 - as its clock has it
        """Mark the present moment."""
        return self._clock.mark()

    def flew(self, launched: Any, asked: Any) -> None:  # noqa: ANN401 - marks
        """Count a collective that has landed, in order of launch.

        One that had landed before anyone asked for it counts as on its way until then.

        Args:
            launched: when it began to travel.
            asked: since when nothing but its end was waited for.
        """
        self._flights.append((self._begun, launched, asked, self._clock.mark()))

    def spending(self) -> Spending:
        """Tell what the steps so far took, the present phase left out."""
        self._settle()
        return Spending(
            steps=max(1, self._steps - 1),
            phases=dict(self._spent),
            in_flight=self._in_flight,
            waited=self._waited,
        )

    def _settle(self) -> None:
        """Add up what has passed."""
        self._settle_flights()
        while self._ahead:
            phase, before, after = self._ahead[0]
            seconds = self._clock.between(before, after)
            if seconds is None:
                return
            self._ahead.popleft()
            if phase == "data":
                self._steps += 1
                if self._steps <= WARM:
                    self._spent = {}
            if phase not in self._spent:
                self._spent[phase] = Spent()
            self._spent[phase].add(seconds)

    def _settle_flights(self) -> None:
        """Add up what has landed; time in which several travelled counts once."""
        between = self._clock.between
        while self._flights:
            step, launched, asked, landed = self._flights[0]
            travelled, waited = between(launched, landed), between(asked, landed)
            if travelled is None or waited is None:
                return
            self._flights.popleft()
            if self._flown_step < step <= WARM:
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
