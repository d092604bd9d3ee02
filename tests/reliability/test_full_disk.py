"""Harnesses 6 and 7: the disk is full, or refuses, before the next steps or behind them.

Nothing that is there is harmed, the line names path, need and room, `checkpoint.on_full` is
obeyed, a run without its last state does not end well (exit 8), and with room made the same
command ends as the undisturbed run. What fails behind the steps is heard of within one step.
"""

from __future__ import annotations

import errno
import functools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reliability import lab
from tests.reliability.faults import Fault, FaultyDisk
from tests.reliability.support import cases, replay
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.core import durable
from trainer.report import journal

SIZES_KB = (130, 260, 420)
SIZES_KB_NIGHTLY = tuple(range(24, 520, 16))


@functools.cache
def can_mount() -> bool:
    """Whether this machine lets a user mount a file system of their own."""
    try:
        trial = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def fill_disks(sizes: tuple[int, ...], place: Path) -> None:
    if not can_mount():
        pytest.skip(
            "NOT SHOWN HERE: that a really full file system harms nothing; `unshare -Urm` may not "
            "mount a tmpfs. The faults that this process injects were still run."
        )
    program = ["unshare", "-Urm", sys.executable, "-m", "tests.reliability.full_disk"]
    done = subprocess.run(
        [*program, str(place), *map(str, sizes)],
        cwd=lab.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(sizes)
    for found in results:
        about = json.dumps(found, indent=1)
        assert found["code"] in (0, 8), about
        assert "\n" not in found["error"], about
        assert found["intact"] == found["steps"], about
        for log in ("logged", "ledger"):
            assert found[log] == list(range(1, len(found[log]) + 1)), about
        if found["code"] == 8:
            assert "free" in found["error"], about
        if found["on_full"] == "continue" and found["steps"]:
            assert len(found["logged"]) == 7 or "status.json" in found["error"], about
        assert found["then"] == 0, about
        assert found["outcome"] == "[]", about
        assert found["left"] == [], about
    codes = {code: sum(found["code"] == code for found in results) for code in (0, 8)}
    print(f"{len(results)} full disks: {codes}")
    assert codes[8] > 0


def test_a_full_disk_harms_nothing_and_is_said(tmp_path: Path) -> None:
    fill_disks(SIZES_KB, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_disks_of_every_size_harm_nothing(tmp_path: Path) -> None:
    fill_disks(SIZES_KB_NIGHTLY, tmp_path)


class Refusing(FaultyDisk):
    """Has no room for checkpoints, from the second one on, or at some steps."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.refused = tuple(f"step-{step:08d}" for step in steps)
        self.told_at: list[str] = []

    def make_folder(self, path: Path) -> None:
        if any(name in path.name for name in self.refused):
            self.point, self.fault = len(self.operations), "ENOSPC"
        super().make_folder(path)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_disk_that_is_full_stops_the_run_at_once(asynchronous: str, tmp_path: Path) -> None:
    settings = lab.config(f"checkpoint.asynchronous={asynchronous}")
    with durable.use(Refusing(4)):
        ended = lab.run(settings, tmp_path, after_step=lambda step: time.sleep(0.05))
    assert ended.code == 8
    assert "step-00000004" in ended.error
    assert "free" in ended.error
    done = max(entry["step"] for entry in journal.read(tmp_path / "metrics.jsonl"))
    assert done <= 5 + (asynchronous == "true")
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2]
    assert lab.status(tmp_path)["exit_code"] == 8
    assert lab.go_on(settings, tmp_path).code == 0


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize(("refused", "code"), [((4,), 0), ((2, 4, 6), 0), ((7,), 8), ((6, 7), 8)])
def test_a_run_may_go_on_without_saving_but_does_not_end_so(
    refused: tuple[int, ...], code: int, asynchronous: str, tmp_path: Path
) -> None:
    settings = lab.config("checkpoint.on_full=continue", f"checkpoint.asynchronous={asynchronous}")
    with durable.use(Refusing(*refused)):
        ended = lab.run(settings, tmp_path)
    assert ended.code == code, ended
    assert ("going on without saving" in ended.screen) == (refused != (7,))
    assert max(e["step"] for e in journal.read(tmp_path / "metrics.jsonl")) == 7
    assert lab.status(tmp_path)["exit_code"] == code
    ended = lab.go_on(settings, tmp_path)
    assert ended.code == 0, ended


def test_a_preempted_run_that_cannot_save_does_not_say_it_did(tmp_path: Path) -> None:
    with durable.use(Refusing(3)):
        settings = lab.config("checkpoint.on_full=continue")
        ended = lab.run(settings, tmp_path, after_step=lab.stop_at(3))
    assert ended.code == 8, ended


class Cramped(FaultyDisk):
    """Has room for so many bytes, and writes what of a buffer still fits."""

    room = 1 << 30

    def write(self, handle: int, data: memoryview) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(handle, data[: self.room])
        self.room -= written
        return written


@given(rooms=st.lists(st.integers(0, 60), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_log_on_a_disk_that_fills_again_and_again_holds_every_step_once(
    rooms: list[int],
) -> None:
    disk = Cramped()
    with TemporaryDirectory() as folder, durable.use(disk):
        path = Path(folder) / "metrics.jsonl"
        log = journal.Journal(path, lambda text: None)
        for step, room in enumerate(rooms):
            disk.room = room
            log.write({"step": step, "loss": 0.5})
        disk.room = 1 << 20
        log.sync()
        assert [entry["step"] for entry in journal.read(path)] == list(range(len(rooms)))
        assert path.read_bytes().count(b"\n") == len(rooms)


FAULTS: tuple[Fault, ...] = ("ENOSPC", "EIO", "ENOSPC for good", "EIO for good")


def test_what_fails_behind_the_steps_is_heard_of_within_one_step(tmp_path: Path) -> None:
    settings = lab.config("checkpoint.asynchronous=true", "eval.every=null")
    heard = 0
    for case, chance in cases(10):
        fault = chance.choice(FAULTS)
        disk = _Background(chance.randrange(12), fault)
        folder = tmp_path / f"run{case}"
        with durable.use(disk):
            ended = lab.run(settings, folder, after_step=disk.after_step)
        if disk.struck_at is None:
            assert ended.code == 0
            continue
        assert ended.code == 8, f"{replay(case)}: {ended}"
        assert disk.steps[-1] <= disk.struck_at + 1, replay(case)
        heard += 1
        assert lab.go_on(settings, folder).code == 0, replay(case)
    print(f"{heard} of 10 faults struck behind the steps; all were heard of within one step")
    assert heard >= 7


class _Background(FaultyDisk):
    """Fails within the writing of a checkpoint, on the writer's thread alone."""

    def __init__(self, point: int, fault: Fault) -> None:
        super().__init__(-1, fault)
        self.wanted = point
        self.struck_at: int | None = None
        self.steps: list[int] = [0]
        self.seen = 0

    def after_step(self, step: int) -> None:
        self.steps.append(step)
        time.sleep(0.03)

    def _is_next(self) -> bool:
        return self.point == len(self.operations)

    def _do(self, operation: str, act: object) -> object:  # type: ignore[override]
        if threading.current_thread().name.startswith("checkpoint"):
            if self.seen == self.wanted:
                self.point, self.struck_at = len(self.operations), self.steps[-1]
            self.seen += 1
        elif "for good" in self.fault:
            return act()  # type: ignore[operator]
        return super()._do(operation, act)  # type: ignore[arg-type]


def test_what_is_written_behind_the_steps_is_the_state_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty saves with a slow writer hold what direct saves hold."""
    many = ("steps=26", "checkpoint.every=1", "checkpoint.keep=99", "eval.every=null")
    direct = lab.config(*many, "model.dropout=0.2")
    assert lab.run(direct, tmp_path / "direct").code == 0
    save = CheckpointStore.save_files

    def slowly(store: CheckpointStore, *state: object) -> Path:
        time.sleep(0.004)
        return save(store, *state)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "save_files", slowly)
    saves = 0
    for number in range(2):
        behind = tmp_path / f"behind{number}"
        settings = lab.config(*many, "model.dropout=0.2", "checkpoint.asynchronous=true")
        assert lab.run(settings, behind).code == 0
        for step in CheckpointStore(behind / "checkpoints").steps():
            expected = lab.outcome(tmp_path / "direct", step=step)
            lab.assert_same(lab.outcome(behind, step=step), expected, f"step {step}")
            saves += 1
    print(f"{saves} saves behind the steps")
    assert saves >= 50


def test_a_snapshot_that_shares_memory_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.writer.copy_files", dict)
    with pytest.raises(AssertionError, match="step"):
        test_what_is_written_behind_the_steps_is_the_state_at_its_step(tmp_path, monkeypatch)


def test_a_failure_that_nobody_reads_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "_finish", lambda saver: None)
    with pytest.raises(AssertionError):
        test_what_fails_behind_the_steps_is_heard_of_within_one_step(tmp_path)
