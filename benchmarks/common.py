"""What the benchmarks share: timing that knows how quiet the machine was, tables, and JSON.

One foreign process makes a loop of two threads several times slower, since threads that wait for
each other spin. So every timing records the share of the machine that other programs used
meanwhile, and a figure is the median of the quiet runs where at least half of them were quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, final

FOLDER = Path("outputs/benchmarks")
"""Where results go unless told otherwise."""

QUIET = 0.05
"""Share of the machine's time that other programs may take."""


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """A moment.

    Attributes:
        wall: seconds since some moment.
        own: CPU seconds of this process and of its children that have ended.
        busy: CPU seconds of the whole machine, or None where it does not tell.
    """

    wall: float
    own: float
    busy: float | None

    @classmethod
    def now(cls) -> Mark:
        """Take the time."""
        return cls(time.perf_counter(), sum(os.times()[:4]), _busy_s())


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """How long something took.

    Attributes:
        seconds: of wall time.
        foreign: share of the machine that other programs used meanwhile; None where unknown.
    """

    seconds: float
    foreign: float | None

    @classmethod
    def between(cls, begin: Mark, end: Mark) -> Timing:
        """Measure from one moment to a later one."""
        seconds = end.wall - begin.wall
        if begin.busy is None or end.busy is None:
            return cls(seconds, None)
        others = end.busy - begin.busy - (end.own - begin.own)
        return cls(seconds, max(0.0, others / (seconds * (os.cpu_count() or 1))))

    @property
    def is_quiet(self) -> bool:
        """Whether other programs hardly ran."""
        return self.foreign is None or self.foreign <= QUIET


@final
@dataclass
class Figures:
    """One number, measured several times.

    Attributes:
        values: one per run.
        timings: what each run took, and how quiet it was.
    """

    values: list[float] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    def add(self, value: float, timing: Timing) -> None:
        """Take a run."""
        self.values.append(value)
        self.timings.append(timing)

    @property
    def used(self) -> list[float]:
        """Values of the quiet runs; of all where fewer than half were quiet."""
        pairs = zip(self.values, self.timings, strict=True)
        quiet = [value for value, timing in pairs if timing.is_quiet]
        return quiet if 2 * len(quiet) >= len(self.values) else self.values

    @property
    def median(self) -> float:
        """Median of the values used."""
        return median(self.used)

    @property
    def foreign(self) -> float:
        """Largest foreign share of the values used."""
        used = self.used
        pairs = zip(self.values, self.timings, strict=True)
        return max(timing.foreign or 0.0 for value, timing in pairs if value in used)

    def show(self, form: str = ".2f") -> str:
        """Write the median, and the range in brackets."""
        used = self.used
        return f"{self.median:{form}} ({min(used):{form}}-{max(used):{form}})"

    def to_json(self) -> dict[str, Any]:
        """Give all that was measured."""
        return {
            "median": self.median,
            "min": min(self.used),
            "max": max(self.used),
            "runs_used": len(self.used),
            "values": self.values,
            "seconds": [timing.seconds for timing in self.timings],
            "foreign": [timing.foreign for timing in self.timings],
        }


def parser_of(description: str | None, name: str, **numbers: int) -> argparse.ArgumentParser:
    """Give a parser of numbers with their defaults, and of the file that results go to."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for number, default in numbers.items():
        parser.add_argument(f"--{number}", type=int, default=default)
    parser.add_argument("--json", type=Path, default=FOLDER / f"{name}.json")
    return parser


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, the first column to the left and all others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        first, *others = (
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip(), flush=True)


def write_results(path: Path, settings: Mapping[str, Any], results: Any) -> None:  # noqa: ANN401 - any JSON
    """Write results beside what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"settings": dict(settings), "machine": machine(), "results": results}
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"\nwritten to {path}")


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    from importlib.metadata import version  # noqa: PLC0415 - costs start-up time

    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _busy_s() -> float | None:
    """CPU seconds that all programs took since the machine started."""
    try:
        with Path("/proc/stat").open() as stat:
            user, nice, system, _idle, _wait, irq, softirq, *_ = map(
                int, stat.readline().split()[1:]
            )
    except OSError:
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
