"""Harnesses 3 and 4: SIGKILL at any moment; the same command, typed again, ends as if nothing was.

The parameters, the whole remaining state, the metrics and the ledger of the run that was killed
equal those of one that was not. At most one save interval of work is done again, and the save
that was under way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.reliability import lab
from tests.reliability.support import cases, replay
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.store import CheckpointStore
from trainer.report import journal

VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("checkpoint.every=1", "checkpoint.keep=1", "eval.every=null"),
    ("checkpoint.asynchronous=true", "checkpoint.every=2"),
    ("data.faults=['3:loss:nan','5:oom']", "model.dropout=0.2"),
)
NUM_KILLS = 12
NUM_KILLS_NIGHTLY = 2000

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def work_is_kept(folder: Path, variant: tuple[str, ...]) -> bool:
    """Whether no more is lost than one interval, and the save under way."""
    every = 1 if "checkpoint.every=1" in variant else 2
    in_flight = every if "checkpoint.asynchronous=true" in variant else 0
    done = max((entry["step"] for entry in journal.read(folder / "metrics.jsonl")), default=0)
    saved = max(CheckpointStore(folder / "checkpoints").steps(), default=0)
    return done - saved <= every + in_flight


def keeps_intact(folder: Path) -> bool:
    """Whether everything named like a checkpoint is one; a damaged one raises."""
    store = CheckpointStore(folder / "checkpoints")
    return all(verify(store.path(step), step) for step in store.steps())


def kill_warm_runs(count: int, tmp_path: Path) -> None:
    references, lasts = {}, {}
    for number, variant in enumerate(VARIANTS):
        folder = tmp_path / f"undisturbed{number}"
        for _ in range(2):  # the first run of a process is slow
            with lab.timed() as seconds:
                child = lab.fork(lambda v=variant, f=folder: lab.run(lab.config(*v), f).code)
                assert child.wait() == 0
                lasts[variant] = seconds()
        references[variant] = lab.outcome(folder)
    kills = runs = 0
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
            assert work_is_kept(folder, variant), replay(case)
            assert keeps_intact(folder), replay(case)
        child = lab.fork(lambda v=variant, f=folder: lab.go_on(lab.config(*v), f).code, log)
        assert child.wait() == 0, f"{replay(case)}: {log.read_text()}"
        lab.assert_same(lab.outcome(folder), references[variant], replay(case))
        runs += 1
    print(f"{kills} kills over {runs} runs, all equal to the undisturbed ones")


def test_a_run_that_is_killed_at_any_moment_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    kill_warm_runs(NUM_KILLS, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_two_thousand_kills_change_nothing(tmp_path: Path) -> None:
    kill_warm_runs(NUM_KILLS_NIGHTLY, tmp_path)


class CommandLine:
    """One command line, typed again and again in one folder, as a user or a cluster does."""

    def __init__(self, place: Path, *more: str) -> None:
        self.place = place
        self.place.mkdir()
        settings = lab.lines("steps=4", "checkpoint.every=1", "checkpoint.keep=1")
        self.argv = [sys.executable, "-m", "trainer", *settings, "resume=auto", *more]

    def start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(lab.ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self.argv,
            cwd=self.place,
            env=environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def finish(self) -> None:
        ended = self.start()
        _, err = ended.communicate(timeout=120)
        assert ended.returncode == 0, err

    def folder(self) -> Path:
        """The run that has a result; there is one."""
        (result,) = self.place.glob("outputs/*/*/result.json")
        return result.parent

    def shows(self, pattern: str) -> bool:
        return any(self.place.glob(f"outputs/*/*/{pattern}"))


def moments(chance: Random) -> list[Callable[[CommandLine, float], bool]]:
    """When to kill: at random, and at what random moments seldom hit."""

    def at(pattern: str) -> Callable[[CommandLine, float], bool]:
        return lambda line, now: line.shows(pattern)

    def after(share: float) -> Callable[[CommandLine, float], bool]:
        return lambda line, now: now > share

    return [
        at("checkpoints/.tmp-step-*"),
        at("status.json"),
        after(chance.random()),
        at("checkpoints/.trash-*"),
        at(".hydra"),
        at("checkpoints/step-00000004"),
        after(chance.random()),
        at("config.yaml"),
        at("result.json"),
        after(chance.random()),
    ]


def kill_command_lines(count: int, tmp_path: Path) -> None:
    undisturbed = CommandLine(tmp_path / "undisturbed")
    with lab.timed() as seconds:
        undisturbed.finish()
        lasts = seconds()
    expected = lab.outcome(undisturbed.folder(), rng=False)
    kills = 0
    for case, chance in cases(count):
        fixed = ["hydra.run.dir=outputs/day/fixed"] if case % 2 else []
        line = CommandLine(tmp_path / f"case{case}", *fixed)
        among = moments(chance)
        is_due = among[case % len(among)]
        process, started = line.start(), time.perf_counter()
        while process.poll() is None and not is_due(line, (time.perf_counter() - started) / lasts):
            time.sleep(0.001)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        line.finish()
        lab.assert_same(lab.outcome(line.folder(), rng=False), expected, replay(case))
    print(f"{kills} kills of {count} command lines, each completed by the same command")
    assert kills >= count // 2


def test_the_same_command_line_completes_a_run_that_was_killed(tmp_path: Path) -> None:
    kill_command_lines(2, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_same_command_line_completes_after_thirty_kills(tmp_path: Path) -> None:
    kill_command_lines(30, tmp_path)


def test_lost_work_is_noticed(tmp_path: Path) -> None:
    def die(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = lab.config("checkpoint.every=null")
    assert lab.fork(lambda: lab.run(settings, tmp_path, after_step=die).code).wait() == -9
    assert not work_is_kept(tmp_path, ())
