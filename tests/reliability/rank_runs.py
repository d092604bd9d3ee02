"""Runs over several ranks, typed as a user types them, and what becomes of their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.reliability import lab

TYPED = (
    "model._target_=tests.reliability.rank_toys.Net",
    "data._target_=tests.reliability.toys.Rows",
    "batch.global=8",
    "accum=fixed",
    "accum.micro=2",
    "steps=7",
    "checkpoint.every=2",
    "eval.every=3",
    "log.samples=true",
    "wandb.mode=disabled",
    "device=cpu",
    "parallel.ranks=2",
)
LIMIT_S = 120.0


@dataclass
class Ended:
    """How a command ended.

    Attributes:
        errors: its lines on stderr.
        at: when, in seconds since the epoch.
    """

    code: int
    errors: list[str]
    at: float


@dataclass
class RankRun:
    """One command in a folder of its own, so that its processes can be told by it."""

    place: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, place: Path, *typed: str, **environment: str) -> RankRun:
        (place / "marks").mkdir(parents=True, exist_ok=True)
        own = (*TYPED, f"hydra.run.dir={place / 'run'}")
        keys = {line.partition("=")[0] for line in typed}
        words = [line for line in own if line.partition("=")[0] not in keys]
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *words, *typed],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(lab.ROOT), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return cls(place, process)

    @property
    def folder(self) -> Path:
        return self.place / "run"

    def end(self) -> Ended:
        """Wait for the command's end."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        lines = [line for line in errors.splitlines() if line.strip()]
        return Ended(self.process.returncode, lines, time.time())

    def wait_for(self, condition: str) -> None:
        """Wait until a file exists that matches the pattern."""
        limit = time.monotonic() + LIMIT_S
        while not any(self.place.glob(condition)):
            assert time.monotonic() < limit, f"no {condition}"
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)

    def struck_at(self) -> float:
        """When the strike was that happened last."""
        return max(float(mark.read_text()) for mark in (self.place / "marks").iterdir())

    def left(self) -> dict[int, str]:
        """Processes of this run, the command itself aside, with their command lines."""
        return {
            pid: (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
            for pid in processes_in(self.place)
            if pid != self.process.pid
        }

    def kill_what_is_left(self) -> None:
        for pid in processes_in(self.place):
            os.kill(pid, signal.SIGKILL)

    def assert_none_left(self, about: str, seconds: float = 15.0) -> None:
        limit = time.monotonic() + seconds
        while processes_in(self.place):
            assert time.monotonic() < limit, f"{about}: left {self.left()}"
            time.sleep(0.05)


def processes_in(place: Path) -> list[int]:
    """Processes whose current folder is `place` and that are no mere entry of the table."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                is_here = (entry / "cwd").readlink() == place
            except OSError:
                continue
            if is_here:
                found.append(int(entry.name))
    return found
