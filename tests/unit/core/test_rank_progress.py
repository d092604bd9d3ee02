"""Where a rank is, which a supervisor reads while it is written, and what its phases took."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from trainer.core.rank_progress import InStep, PhaseTimes, RankProgress

STEP = get_args(InStep)

WRITER = """
import sys
from pathlib import Path
from trainer.core.rank_progress import RankPosition, RankProgress
progress = RankProgress(Path(sys.argv[1]))
progress.write(RankPosition(5, "compute"))
print("begun", flush=True)
while True:
    progress.next_micro_batch()
"""


def test_a_place_that_is_read_while_it_is_written_is_never_an_older_one(tmp_path):
    """Zeros in between, of a time, would be a rank that has hung since the machine started."""
    path, root = tmp_path / "place", Path(__file__).parents[3]
    line = [sys.executable, "-c", WRITER, path]
    with subprocess.Popen(line, cwd=root, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
            progress = RankProgress(path)
            places = [progress.read() for _ in range(100_000)]
        finally:
            writer.kill()
    assert {(place.step, place.phase) for place in places} == {(5, "compute")}
    assert places[0].since > 0
    times = [place.since for place in places]
    assert times == sorted(times)
    assert places[-1].micro_batch > places[0].micro_batch


class Late:
    """A clock whose marks lie ahead until they are let pass, as events of a stream do."""

    def __init__(self, passed: float = float("inf")) -> None:
        self.now, self.passed = 0.0, passed

    def mark(self) -> Event:
        self.now += 1.0
        return Event(self, self.now)


@dataclass(frozen=True)
class Event:
    """A mark of such a clock."""

    clock: Late
    at: float

    def query(self) -> bool:
        return self.at <= self.clock.passed

    def elapsed_time(self, after: Event) -> float:
        return 1e3 * (after.at - self.at)


def test_the_first_step_warms_up_where_there_is_another_and_a_phase_counts_when_it_has_passed():
    for num_steps in (1, 5):
        times = PhaseTimes(Late().mark)
        for phase in (*STEP * num_steps, "end"):
            times.enter(phase)
        found, counted = times.spending(), max(1, num_steps - 1)
        assert found["steps"] == counted
        assert found["phases"]["compute"] == {"seconds": counted, "times": counted, "least": 1.0}
    clock = Late(passed=0.0)
    times = PhaseTimes(clock.mark)
    for phase in STEP * 3:
        times.enter(phase)
    assert times.spending()["phases"] == {}
    clock.passed = clock.now
    found = times.spending()
    seconds = {name: spent["seconds"] for name, spent in found["phases"].items()}
    assert seconds == dict.fromkeys(STEP, 2.0) | {"report": 1.0}
