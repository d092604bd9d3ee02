"""Write numbers, durations and pieces of text as a person reads them. Pure functions."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from textwrap import TextWrapper
from typing import IO, TextIO

from trainer.core.urls import copy_of, is_url, url_of

# From here on a number without decimals is written as 1000, and so in the next unit.
ROUNDS_TO_1000 = 999.5

DTYPE_WORDS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What PyTorch calls its dtypes, and the field's words for them."""

AVERAGED = "ema_eval"
"""Begins names of means by averaged weights, where those by the weights begin with `eval`."""


def number(value: float) -> str:
    """Write a count in full, with thousands separated: `8,192`."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def plural(count: float, noun: str) -> str:
    """Write a count with its noun: `1 rank`, `11 micro-batches`."""
    if count == 1:
        return f"{number(count)} {noun}"
    ending = "es" if noun.endswith(("batch", "process", "class")) else "s"
    return f"{number(count)} {noun}{ending}"


def short(value: float | None) -> str:
    """Write a magnitude in at most five characters: `973`, `41.2k`, `1.24M`."""
    if value is None or not math.isfinite(value):
        return "-"
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def size(num_bytes: float | None) -> str:
    """Write bytes in binary units: `412 MiB`, `13.2 GiB`."""
    if num_bytes is None:
        return "unknown"
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    scaled, power = float(value), 0
    while abs(scaled) >= ROUNDS_TO_1000 and power < len(units) - 1:
        scaled, power = scaled / base, power + 1
    if power == 0:
        return f"{scaled:.0f}{units[0]}"
    return f"{_three_digits(scaled)}{units[power]}"


def _three_digits(value: float) -> str:
    # What rounds to 10.0 has one decimal, and what rounds to 100 none.
    if abs(value) < 9.995:  # noqa: PLR2004
        return f"{value:.2f}"
    if abs(value) < 99.95:  # noqa: PLR2004
        return f"{value:.1f}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """Write a share of one: `1.4%`."""
    return f"{100 * share:.1f}%"


def duration(seconds: float | None) -> str:
    """Write a duration in words: `420 ms`, `8.4 s`, `2 min 8 s`, `3 h 20 min`."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.9995:  # noqa: PLR2004 - rounds to 1000 ms
        return f"{1000 * seconds:.3g} ms"
    if seconds < 9.95:  # noqa: PLR2004 - rounds to 10.0 s
        return f"{seconds:.1f} s"
    minutes, whole_s = divmod(round(seconds), 60)
    hours, whole_min = divmod(minutes, 60)
    if hours:
        return f"{hours} h {whole_min} min"
    if minutes:
        return f"{minutes} min {whole_s} s"
    return f"{whole_s} s"


def clock(seconds: float | None) -> str:
    """Write a countdown: `0:00:42`, `4 days, 7:12:00`; `-:--` while it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    return str(timedelta(seconds=max(0, round(seconds))))


def loss(value: float | None) -> str:
    """Write a loss in nats: four decimals while it is of ordinary size."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if abs(value) < 1e4:  # noqa: PLR2004
        return f"{value:.4f}"
    return f"{value:.3e}"


def rate(value: float | None) -> str:
    """Write a gradient norm or a learning rate with three digits: `0.83`, `2.00e-04`."""
    if value is None or not math.isfinite(value):
        return "-"
    # Two decimals show a value from 0.01 on.
    if value == 0 or 0.01 <= abs(value) < ROUNDS_TO_1000:  # noqa: PLR2004
        return _three_digits(value)
    return f"{value:.2e}"


def printable(text: str) -> str:
    r"""Make foreign text safe to print: control characters become escapes, a newline `\n`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Make foreign text of several lines safe to print, as `printable` does; lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def at_words(text: str, file: IO[str]) -> str:
    """Break lines at blanks where a terminal would break words; a path stays in one piece."""
    if not file.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(lines.fill, text.split("\n")))


def lead_nowhere(file: TextIO) -> None:
    """Point a file that nobody reads any more, a pipe say, at nothing."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), file.fileno())


def expanded(typed: str) -> Path:
    """Read a path as one types it, of a URL that of its copy; a `~name` of nobody stays."""
    if is_url(typed):
        return copy_of(typed)
    return Path(os.path.expanduser(typed))  # noqa: PTH111 - of pathlib it raises


def python_text(text: str) -> str:
    """Write a text as Python has it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def shown_path(path: Path) -> str:
    """Write a path as one would type it from here, quoted: relative, or the URL of a copy."""
    with suppress(ValueError, OSError):
        path = path.absolute().relative_to(Path.cwd())
    return shlex.quote(url_of(path) or str(path))


METRIC_TITLES = "metric_titles"
"""In plan.json: what a person reads in place of the names of some figures."""


def figure_texts(means: Mapping[str, float], titles: Mapping[str, str]) -> list[str]:
    """Write the figures of an evaluation; `titles` take the place of some names."""
    texts = list[str]()
    for name, mean in means.items():
        # Four decimals would hide the sign and size of a small margin.
        is_small = 0 < abs(mean) < 1e-3  # noqa: PLR2004
        texts.append(f"{titles.get(name, name)} {mean:{'.3e' if is_small else '.4f'}}")
    return texts


def named_means(means: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Put the name of each part before those of its figures; the run's own part has none."""
    named = dict[str, float]()
    for part, metrics in means.items():
        for name, value in metrics.items():
            named[f"{part}_{name}".removeprefix("_")] = value
    return named


def figure_name(name: str) -> str:
    """Name a mean of an evaluation as metrics.jsonl does: `eval_loss`, `ema_eval_loss`."""
    return name if is_held_out(name) else f"eval_{name}"


def is_held_out(name: str) -> bool:
    """Whether a name of metrics.jsonl is that of a mean over held-out data."""
    return name.startswith(("eval_", f"{AVERAGED}_"))


def part_title(part: str) -> str:
    """Name a part of the held-out data for people."""
    own = part.removeprefix(AVERAGED)
    title = own.removeprefix("_") or "held out"
    return title if own == part else f"{title}, averaged weights"
