"""Harnesses 3 and 4: SIGKILL at any moment; the command, typed again, ends as if nothing was."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lib.nightly import counts, nightly
from tests.lib.processes import Command
from tests.reliability import lab
from tests.reliability.support import cases, intact_steps, replay
from trainer.report import journal

VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("checkpoint.every=1", "checkpoint.keep=1", "eval.every=null"),
    ("checkpoint.asynchronous=true", "checkpoint.every=2"),
    ("data.faults=['3:loss:nan','5:oom']", "model.dropout=0.2"),
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def is_work_lost(folder: Path, variant: tuple[str, ...]) -> bool:
    """Whether more is lost than one interval, and the save under way; what is there is intact."""
    every = 1 if "checkpoint.every=1" in variant else 2
    in_flight = every if "checkpoint.asynchronous=true" in variant else 0
    done = max((entry["step"] for entry in journal.read(folder / "metrics.jsonl")), default=0)
    return done - max(intact_steps(folder / "checkpoints"), default=0) > every + in_flight


@counts(1, 400)
def test_a_run_that_is_killed_at_any_moment_ends_as_the_undisturbed_one(count, tmp_path):
    assert lab.run(lab.config(), tmp_path / "warm").code == 0, "the first run is slow"
    references, lasts = {}, {}
    for number, variant in enumerate(VARIANTS[:count]):
        folder = tmp_path / f"undisturbed{number}"
        with lab.timed() as seconds:
            assert lab.run(lab.config(*variant), folder).code == 0
            lasts[variant] = seconds()
        references[variant] = lab.outcome(folder)
    kills = 0
    for case, chance in cases(count):
        if kills >= count:
            break
        variant = VARIANTS[case % len(VARIANTS)]
        folder, log = tmp_path / f"run{case}", tmp_path / f"log{case}"
        for _ in range(chance.randint(1, 3)):
            child = lab.fork(lambda v=variant, f=folder: lab.go_on(lab.config(*v), f).code, log)
            time.sleep(chance.uniform(0, lasts[variant]))
            child.kill()
            kills += child.wait() == -signal.SIGKILL
            assert not is_work_lost(folder, variant), replay(case)
        child = lab.fork(lambda v=variant, f=folder: lab.go_on(lab.config(*v), f).code, log)
        assert child.wait() == 0, f"{replay(case)}: {log.read_text()}"
        lab.assert_same(lab.outcome(folder), references[variant], replay(case))
    print(f"{kills} kills, all runs equal to the undisturbed ones")


SETTINGS = lab.lines("steps=4", "checkpoint.every=1", "checkpoint.keep=1", "resume=auto")


def start(place: Path, *more: str) -> Command:
    """Type one command line, again and again in one folder, as a user or a cluster does."""
    place.mkdir(exist_ok=True)
    return Command.start(place, [*SETTINGS, *more])


def finish(command: Command) -> dict[str, Any]:
    """Wait for the end; gives what the one run that has a result left."""
    ended = command.end()
    assert ended.code == 0, ended
    (result,) = command.place.glob("outputs/*/*/result.json")
    return lab.outcome(result.parent, rng=False)


MOMENTS = (
    *("checkpoints/.tmp-step-*", "status.json", "", "checkpoints/.trash-*", ".hydra"),
    *("checkpoints/step-00000004", "", "config.yaml", "result.json", ""),
)
"""When to kill: when a name is there, or at a random share of the time that a run takes."""


@pytest.mark.parametrize("count", [nightly(10)])
def test_the_same_command_line_completes_a_run_that_was_killed(count, tmp_path):
    with lab.timed() as seconds:
        expected = finish(start(tmp_path / "undisturbed"))
        lasts = seconds()
    kills = 0
    for case, chance in cases(count):
        place, fixed = tmp_path / f"case{case}", ["hydra.run.dir=outputs/day/fixed"] * (case % 2)
        moment, share = MOMENTS[case % len(MOMENTS)], chance.random()
        command, started = start(place, *fixed), time.perf_counter()
        process = command.process
        while process.poll() is None:
            is_due = time.perf_counter() - started > share * lasts
            if moment:
                is_due = any(place.glob(f"outputs/*/*/{moment}"))
            if is_due:
                break
            time.sleep(0.001)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        lab.assert_same(finish(start(place, *fixed)), expected, replay(case))
    print(f"{kills} kills of {count} command lines, each completed by the same command")
    assert kills >= count / 2


def test_lost_work_is_noticed(tmp_path):
    def die(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = lab.config("checkpoint.every=null")
    assert lab.fork(lambda: lab.run(settings, tmp_path, after_step=die).code).wait() == -9
    assert is_work_lost(tmp_path, ())
