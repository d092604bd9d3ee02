"""Write numbers, durations and pieces of text as a person reads them. Pure functions."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

ROUNDS_TO_1000 = 999.5
MINUTE_S = 60
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S
UNKNOWN = "unknown"


def number(value: float) -> str:
    """Write a count in full, with thousands separated: `8,192`."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def plural(count: float, noun: str) -> str:
    """Write a count with its noun: `1 rank`, `11 micro-batches`."""
    ending = "es" if noun.endswith(("batch", "process")) else "s"
    return f"{number(count)} {noun}{'' if count == 1 else ending}"


def short(value: float | None) -> str:
    """Write a magnitude in at most five characters: `973`, `41.2k`, `1.24M`."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < ROUNDS_TO_1000:
        return f"{value:.0f}"
    for unit in ("k", "M", "B"):
        value /= 1000
        if abs(value) < ROUNDS_TO_1000:
            return f"{three_digits(value)}{unit}"
    return f"{value / 1000:.3g}T"


def three_digits(value: float) -> str:
    """Write a number below 1000 with three significant digits: `1.24`, `41.2`, `412`."""
    for digits, limit in ((2, 9.995), (1, 99.95)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def size(num_bytes: float | None) -> str:
    """Write bytes in binary units: `412 MiB`, `13.2 GiB`."""
    if num_bytes is None:
        return UNKNOWN
    if abs(num_bytes) < ROUNDS_TO_1000:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < ROUNDS_TO_1000:
            return f"{three_digits(value)} {unit}"
    return f"{three_digits(value / 1024)} TiB"


def percent(share: float) -> str:
    """Write a share of one: `1.4%`."""
    return f"{100 * share:.1f}%"


def duration(seconds: float | None) -> str:
    """Write a duration in words: `420 ms`, `8.4 s`, `2 min 8 s`, `3 h 20 min`, `4 d 7 h`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.9995:  # noqa: PLR2004 - rounds to 1000 ms
        return f"{1000 * seconds:.3g} ms"
    if seconds < 9.95:  # noqa: PLR2004 - rounds to 10.0 s
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"


def durations(seconds: Sequence[float]) -> list[str]:
    """Write durations in one unit, that of the longest: `1,240 ms`, `0.21 ms`."""
    longest = max(seconds, default=0.0)
    unit, factor = ("ms", 1e3) if longest < 1 else ("s", 1.0)
    digits = 0 if longest * factor >= 100 else 1 if longest * factor >= 10 else 2  # noqa: PLR2004
    return [f"{factor * each:,.{digits}f} {unit}" for each in seconds]


def clock(seconds: float | None) -> str:
    """Write a countdown: `0:42`, `1:02:03`, `4d 07:12`; `-:--` while it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    whole = max(0, round(seconds))
    days, hours = divmod(whole // HOUR_S, 24)
    minutes, rest = whole % HOUR_S // MINUTE_S, whole % MINUTE_S
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss(value: float | None) -> str:
    """Write a loss in nats: four decimals while it is of ordinary size."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"  # noqa: PLR2004


def rate(value: float | None) -> str:
    """Write a gradient norm or a learning rate with three digits: `0.83`, `2.00e-04`."""
    if value is None or not math.isfinite(value):
        return "-"
    ordinary = value == 0 or 0.01 <= abs(value) < ROUNDS_TO_1000  # noqa: PLR2004 - two decimals
    return three_digits(value) if ordinary else f"{value:.2e}"


def printable(text: str) -> str:
    r"""Make foreign text safe to print: control characters become escapes, a newline `\n`.

    A generated sample may hold any byte, terminal commands included.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Make foreign text of several lines safe to print, as `printable` does; lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def lead_nowhere(file: TextIO) -> None:
    """Point a file that nobody reads any more, a pipe say, at nothing; what it holds goes there."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), file.fileno())


def shown_path(path: Path) -> str:
    """Write a path as one would type it from here: relative below the current folder, quoted."""
    try:
        text = str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        text = str(path)
    return shlex.quote(text)
