"""Add up the seconds that a rank spends in each phase of its steps.

Nothing is sent and nothing waited for: an entry costs a microsecond. On an accelerator kernels run
behind the host, so phases are marked on its stream and read when they have passed; where it idles
counts to the phase it idles in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, final

from trainer.core.rank_progress import Phase

WARM_STEP = 2
"""The first step that counts where there are so many: the one before fills caches and compiles."""

Mark = Any
"""A moment: seconds of the host's clock, or an event on the device's stream."""


@final
class PhaseTimes:
    """Adds up what each phase of a rank's steps takes. A step begins with the phase `data`.

    `mark` marks the present moment of the work that was launched so far.
    """

    # Called with every phase that begins; None calls nothing
    on_phase: Callable[[Phase], None] | None = None

    def __init__(self, mark: Callable[[], Mark] = time.perf_counter) -> None:
        self.mark = mark
        self.phase: Phase = "start"
        self._since = mark()
        self._passing: deque[tuple[Phase, Mark, Mark]] = deque()  # in the order of their ends
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
            self._since = self.mark()  # what it took is no part of the phase
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
            seconds = _between(before, after)
            if seconds is None:
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


def _between(before: Mark, after: Mark) -> float | None:
    """Give the seconds between two marks; None while the later one lies ahead."""
    if isinstance(after, float):
        return after - float(before)
    return before.elapsed_time(after) / 1e3 if after.query() else None
