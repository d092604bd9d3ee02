"""Read how long or how often: in steps, shares of a run, epochs or seconds.

Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

import math
import re

from trainer.config.components import EPOCHS

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def parse_time(text: str) -> float | None:
    """Turn `"10min"`, `"2h"` or `"90s"` into seconds; None where it is no time above 0."""
    match = _TIME.fullmatch(text)
    return float(match[1]) * _SECONDS[match[2]] or None if match else None


def cadence_steps(every: float, total_steps: int) -> int:
    """Resolve a cadence; below 1 it is a share of the run, in steps rounded up.

    A share of 0.1 comes due ten times at most, the last time at the end or close to it.
    """
    # 0.1 * 30 is above 3 by the last bit.
    return max(1, math.ceil(round(every * total_steps, 6))) if every < 1 else int(every)


def is_due(
    every: float | str | None, step: int, total_steps: int, before: float, after: float
) -> bool:
    """Whether a cadence in steps, shares of the run or epochs comes due with a step.

    `before` and `after` are the epochs that were over where the step began and ended: 1.5 in the
    midst of the second. Null and a time never come due.
    """
    if every is None:
        return False
    if isinstance(every, str):
        epochs = EPOCHS.fullmatch(every)
        # A third of an epoch is three times in it, whatever the last bit says.
        return epochs is not None and _times(after, epochs[1]) > _times(before, epochs[1])
    return step % cadence_steps(every, total_steps) == 0


def _times(position: float, every: str) -> int:
    return math.floor(position / float(every) + 1e-9)


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Resolve a warm-up; below 1 it is a share of the run, to the nearest step."""
    return round(warmup * total_steps) if warmup < 1 else int(warmup)
