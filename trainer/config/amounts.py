"""Read how much, how long and how often: `20k`, `80GiB`, `10min`, `1epoch`, a share of a run.

Plain Python: it runs while the command line is checked, before numpy or torch are imported.
"""

from __future__ import annotations

import math
import re

ABOVE_0 = r"(\d*[1-9]\d*(?:\.\d+)?|\d+\.\d*[1-9]\d*) ?"
BANDWIDTH = re.compile(f"{ABOVE_0}([kMGT])(b|B)(?:ps|/s)")
EPOCHS = re.compile(f"{ABOVE_0}epochs?")

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B")
# No memory is smaller: such a number lacks its unit.
_LEAST_BYTES = 1024
_STEPS = re.compile(r"([1-9]\d{0,17})(?:-([1-9]\d{0,17}))?")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMG])")


def whole(value: object) -> object:
    """Turn a float without a fraction, such as 1e3, into the int it is; leave all else alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_bytes(value: object) -> object:
    """Turn `"80GiB"`, `"512 MB"` or `"100B"` into bytes; refuse a number typed for so many GiB."""
    if isinstance(number := whole(value), int) and number < _LEAST_BYTES:
        raise ValueError("a size needs a unit")
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return number
    amount, prefix, binary = match.groups()
    # The letter's place is the exponent: `G` is the third.
    factor = 1024 if binary else 1000
    return int(float(amount) * factor ** " KMGT".index(prefix or " "))


def parse_count(value: object) -> object:
    """Turn `"20k"` or `"1.5M"` into the number it is; leave all else alone."""
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return whole(value)
    return whole(float(match[1]) * 1000 ** " kMG".index(match[2]))


def parse_time(text: str) -> float | None:
    """Turn `"10min"`, `"2h"` or `"90s"` into seconds; None where it is no time above 0."""
    match = _TIME.fullmatch(text)
    return None if match is None else float(match[1]) * _SECONDS[match[2]] or None


def parse_bandwidth(text: str) -> float | None:
    """Turn `"400Gbps"`, of bits, or `"50GB/s"`, of bytes, into bytes a second, else into None."""
    match = BANDWIDTH.fullmatch(text)
    if match is None:
        return None
    factor = 1000.0 ** " kMGT".index(match[2])
    return float(match[1]) * factor / (8 if match[3] == "b" else 1)


def step_ranges(value: object) -> list[tuple[int, int]]:
    """Read steps such as `401-410`, 450, or a list of these: first and last of each range."""
    found = list[tuple[int, int]]()
    for each in value if isinstance(value, list | tuple) else str(value).split(","):
        match = _STEPS.fullmatch(str(each))
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise ValueError("these are no steps")
        found.append((int(match[1]), int(match[2] or match[1])))
    joined = list[tuple[int, int]]()
    for first, last in sorted(found):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def range_texts(value: object) -> list[str]:
    """Write steps as `step_ranges` reads them, each once: `401-410`, `450`."""
    return [f"{a}-{b}" if a < b else str(a) for a, b in step_ranges(value)]


def cadence_steps(every: float, total_steps: int) -> int:
    """Resolve a cadence; below 1 it is a share of the run, in steps rounded up.

    A share of 0.1 comes due ten times at most, the last time at the end or close to it.
    """
    if every >= 1:
        return int(every)
    # 0.1 * 30 is above 3 by the last bit.
    return max(1, math.ceil(round(every * total_steps, 6)))


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
        if epochs is None:
            return False
        # A third of an epoch is three times in it, whatever the last bit says.
        length = float(epochs[1])
        return math.floor(before / length + 1e-9) < math.floor(after / length + 1e-9)
    return step % cadence_steps(every, total_steps) == 0


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Resolve a warm-up; below 1 it is a share of the run, to the nearest step."""
    return round(warmup * total_steps) if warmup < 1 else int(warmup)
