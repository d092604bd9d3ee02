"""Harness 11: random schedules of everything at once, and the ledger afterwards.

Attempts at one run are killed within a durable operation or between steps, refused the disk, or
preempted; bits rot; rows are not finite or run out of memory. It ends as the undisturbed one.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.lib.nightly import counts
from tests.reliability import lab
from tests.reliability.faults import Fault, FaultyDisk, Killed
from tests.reliability.support import cases, replay
from trainer.checkpoint.store import CheckpointStore
from trainer.config.run_config import RunConfig
from trainer.core import durable

MAX_OPERATIONS = 130
"""Durable operations of a whole run, about."""

ROWS = (
    (),
    ("3:loss:nan", "12:gradient:inf"),
    ("5:oom", "9:loss:-inf"),
    ("7:oom", "8:unlabelled"),
)


def settings_of(rows: int, on_full: str = "stop") -> RunConfig:
    settings = lab.config("checkpoint.keep=3", "model.dropout=0.2", f"checkpoint.on_full={on_full}")
    return lab.with_faults(settings, *ROWS[rows])


class Schedule:
    """One run over failing hardware."""

    def __init__(self, chance: Random, folder: Path) -> None:
        self.chance, self.folder = chance, folder
        self.rows = chance.randrange(len(ROWS))
        self.settings = settings_of(self.rows, chance.choice(("stop", "continue")))
        self.trace: list[str] = []

    def run(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            self.attempt()
            self.rot()
        ended = lab.go_on(self.settings, self.folder)
        self.trace.append(f"at last {ended.code}")
        assert ended.code == 0, (self.trace, ended)

    def attempt(self) -> None:
        kind = self.chance.choice(["disk", "disk", "preemption", "kill"])
        step, point = self.chance.randint(1, 7), self.chance.randrange(MAX_OPERATIONS)
        fault: Fault = self.chance.choice(
            ["kill", "kill halfway", "ENOSPC", "ENOSPC for good", "EIO", "short"]
        )
        disk = FaultyDisk(point if kind == "disk" else -1, fault)
        acts = {"preemption": lab.stop_at(step), "kill": dying(disk, step)}
        try:
            with durable.use(disk):
                ended = lab.go_on(self.settings, self.folder, after_step=acts.get(kind))
            assert ended.code in (0, 6, 8, 75), ended
            code = str(ended.code)
        except Killed:
            code = "killed"
        self.trace.append(f"{kind} {fault if kind == 'disk' else step}: {code}")

    def rot(self) -> None:
        """Flip a bit of the newest checkpoint, where there is another to fall back on."""
        store = CheckpointStore(self.folder / "checkpoints")
        steps = store.steps()
        if len(steps) < 2 or self.chance.random() < 0.7:
            return
        path = self.chance.choice(sorted(store.path(steps[-1]).iterdir()))
        whole = bytearray(path.read_bytes())
        whole[self.chance.randrange(len(whole))] ^= 1 << self.chance.randrange(8)
        path.write_bytes(whole)
        self.trace.append(f"rot in {steps[-1]}")


def dying(disk: FaultyDisk, at: int) -> Callable[[int], None]:
    """Kill the run, as far as its disk can tell, after a step."""
    return lambda step: disk.die() if step == at else None


def assert_ledger(ledger: list[dict[str, Any]]) -> None:
    """Every step once, every sample of an epoch once; the third epoch has only begun."""
    assert [entry["step"] for entry in ledger] == list(range(1, 8))
    for first in (0, 3):
        epoch = [i for entry in ledger[first : first + 3] for i in entry["ids"]]
        assert sorted(epoch) == list(range(23))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of runs that were killed
@counts(1, 300)
def test_whatever_happens_the_run_ends_as_the_undisturbed_one(count, tmp_path):
    expected: dict[int, dict[str, Any]] = {}
    events: Counter[str] = Counter()
    for case, chance in cases(count):
        schedule = Schedule(chance, tmp_path / f"run{case}")
        if schedule.rows not in expected:
            undisturbed = tmp_path / f"undisturbed{schedule.rows}"
            assert lab.run(settings_of(schedule.rows), undisturbed).code == 0
            expected[schedule.rows] = lab.outcome(undisturbed)
            assert_ledger(expected[schedule.rows]["ledger"])
        try:
            schedule.run()
            found = lab.outcome(schedule.folder)
            assert_ledger(found["ledger"])
            lab.assert_same(found, expected[schedule.rows], f"{schedule.trace}")
        except AssertionError as error:
            raise AssertionError(f"{replay(case)}: {schedule.trace}") from error
        events.update(entry.partition(" ")[0] for entry in schedule.trace)
    print(f"{count} schedules: {dict(events)}")
