"""Runs over several ranks, typed as a user types them, and what becomes of their processes."""

import time
from pathlib import Path

from tests.lib.processes import Command, typed_over
from tests.reliability import lab

TYPED = typed_over(
    lab.BASE,
    ("model._target_=tests.reliability.rank_toys.Net", "parallel.ranks=2", "accum.micro=2"),
)


class RankRun:
    """One command in a folder of its own, by which its processes are known."""

    def __init__(self, place: Path, *typed: str, **environment: str) -> None:
        self.place, self.folder = place, place / "run"
        (place / "marks").mkdir(parents=True, exist_ok=True)
        words = typed_over((*TYPED, f"hydra.run.dir={self.folder}"), typed)
        command = Command.start(place, words, **environment)
        self.process, self.end, self.wait_for = command.process, command.end, command.wait_for

    def struck_at(self) -> float:
        """When the strike was that happened last."""
        return max(float(mark.read_text()) for mark in (self.place / "marks").iterdir())

    def assert_none_left(self, about: str, seconds: float = 15.0) -> None:
        limit = time.monotonic() + seconds
        while left := processes_in(self.place):
            assert time.monotonic() < limit, f"{about}: left {left}"
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
