"""Turn times, and shares of a run, into seconds and optimizer steps.

Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

import math
import re

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def parse_time(text: str) -> float | None:
    """Turn `"10min"`, `"2h"` or `"90s"` into seconds; None where it is no time above 0."""
    match = _TIME.fullmatch(text)
    return float(match.group(1)) * _SECONDS[match.group(2)] or None if match else None


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Resolve a warm-up; below 1 it is a share of the run, to the nearest step."""
    return round(warmup * total_steps) if warmup < 1 else int(warmup)


def cadence_steps(every: float, total_steps: int) -> int:
    """Resolve a cadence; below 1 it is a share of the run, in steps rounded up.

    A share of 0.1 comes due ten times at most, the last time at the end or close to it.
    """
    # 0.1 * 30 is above 3 by the last bit.
    return math.ceil(round(every * total_steps, 6)) if every < 1 else int(every)
