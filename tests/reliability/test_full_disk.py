"""Harnesses 6 and 7: the disk is full, or refuses, before the next steps or behind them.

Nothing that is there is harmed, the line names path, need and room, `checkpoint.on_full` is
obeyed, a run without its last state does not end well (exit 8), and with room made the same
command ends as the undisturbed run. What fails behind the steps is heard of within one step.

As a program, started by `unshare` with file systems of its own, it runs a trainer on one of each
size in kilobytes on its command line: `python -m tests.reliability.test_full_disk FOLDER 130 260`.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.nightly import nightly
from tests.reliability import lab
from tests.reliability.faults import Fault, FaultyDisk
from tests.reliability.support import cases, intact_steps, replay
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.core import durable
from trainer.report import journal

MOUNT = ["mount", "-t", "tmpfs", "tmpfs"]
OWN_MOUNTS = ["unshare", "-Urm"]


def can_mount() -> bool:
    """Whether this machine lets a user mount a file system of their own."""
    try:
        trial = [*OWN_MOUNTS, *MOUNT, "/mnt"]
        return subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def fill(here: Path, kilobytes: int, on_full: str) -> dict[str, Any]:
    """Run until a disk of so many bytes is full, mount it larger, and go on."""
    # A checkpoint of about 110 KiB at every step.
    every = ("checkpoint.every=1", "checkpoint.keep=2", "model.width=256", "model.dropout=0.1")
    lab.run(lab.config(*every), here / "undisturbed")
    expected = lab.outcome(here / "undisturbed")
    shutil.rmtree(here / "undisturbed")
    disk, run = here / "disk", here / "disk" / "run"
    disk.mkdir(exist_ok=True)
    subprocess.run([*MOUNT, "-o", f"size={kilobytes << 10}", str(disk)], check=True)
    config = lab.config(*every, f"checkpoint.on_full={on_full}")
    try:
        ended = lab.run(config, run)
    except OSError as error:  # what the trainer must never let through
        ended = lab.Ended(-1, repr(error))
    logs = lab.logged(run)
    found = {
        "on_full": on_full,
        "code": ended.code,
        "error": ended.error,
        "steps": CheckpointStore(run / "checkpoints").steps(),
        "intact": intact_steps(run / "checkpoints"),
        "logged": [e["step"] for e in logs["metrics"] if "lr" in e],
        "ledger": [e["step"] for e in logs["ledger"]],
    }
    subprocess.run([*MOUNT, "-o", f"size={64 << 20},remount", str(disk)], check=True)
    found["then"] = lab.go_on(config, run).code
    found["left"] = [path.name for path in run.rglob(".t*")]
    found["different"] = lab.difference(lab.outcome(run), expected)
    subprocess.run(["umount", str(disk)], check=True)
    return found


@pytest.mark.parametrize("sizes", [(130, 260, 420), nightly(range(24, 520, 16))], ids=len)
def test_a_full_disk_harms_nothing_and_is_named(sizes, tmp_path):
    if not can_mount():
        pytest.skip(
            "NOT SHOWN HERE: that a really full file system harms nothing; `unshare -Urm` may not "
            "mount a tmpfs. The faults that this process injects were still run."
        )
    program = [*OWN_MOUNTS, sys.executable, "-m", "tests.reliability.test_full_disk"]
    typed = [*program, str(tmp_path), *map(str, sizes)]
    done = subprocess.run(typed, cwd=lab.ROOT, capture_output=True, text=True, check=False)
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
        assert (found["then"], found["different"], found["left"]) == (0, [], []), about
    assert any(found["code"] == 8 for found in results)


class Refusing(FaultyDisk):
    """Has no room for checkpoints of some steps."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.refused = tuple(f"step-{step:08d}" for step in steps)

    def make_folder(self, path: Path) -> None:
        if any(name in path.name for name in self.refused):
            self.point, self.fault = len(self.operations), "ENOSPC"
        super().make_folder(path)


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_disk_that_is_full_stops_the_run_at_once(is_behind, tmp_path):
    config = lab.config(f"checkpoint.asynchronous={str(is_behind).lower()}")
    with durable.use(Refusing(4)):
        ended = lab.run(config, tmp_path, after_step=lambda step: time.sleep(0.05))
    assert ended.code == lab.status(tmp_path)["exit_code"] == 8
    assert "step-00000004" in ended.error
    assert "free" in ended.error
    done = max(entry["step"] for entry in journal.read(tmp_path / "metrics.jsonl"))
    assert done <= 5 + is_behind
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2]
    assert lab.go_on(config, tmp_path).code == 0


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize(("refused", "code"), [((2, 4, 6), 0), ((7,), 8), ((6, 7), 8)])
def test_a_run_may_go_on_without_saving_but_does_not_end_so(refused, code, is_behind, tmp_path):
    behind = f"checkpoint.asynchronous={str(is_behind).lower()}"
    config = lab.config("checkpoint.on_full=continue", behind)
    with durable.use(Refusing(*refused)):
        ended = lab.run(config, tmp_path)
    assert ended.code == lab.status(tmp_path)["exit_code"] == code, ended
    assert ("going on without saving" in ended.screen) == (refused != (7,))
    assert max(e["step"] for e in journal.read(tmp_path / "metrics.jsonl")) == 7
    assert lab.go_on(config, tmp_path).code == 0


def test_a_preempted_run_that_cannot_save_does_not_say_it_did(tmp_path):
    config = lab.config("checkpoint.on_full=continue")
    with durable.use(Refusing(3)):
        ended = lab.run(config, tmp_path, after_step=lab.stop_at(3))
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
def test_a_log_on_a_disk_that_fills_again_and_again_holds_every_step_once(rooms):
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


class Background(FaultyDisk):
    """Fails within the writing of a checkpoint, on the writer's thread alone."""

    def __init__(self, point: int, fault: Fault) -> None:
        super().__init__(-1, fault)
        self.wanted, self.seen = point, 0
        self.struck_at: int | None = None
        self.steps: list[int] = [0]

    def after_step(self, step: int) -> None:
        self.steps.append(step)
        time.sleep(0.03)

    def _do(self, operation: str, *arguments: Any) -> Any:
        if threading.current_thread().name.startswith("checkpoint"):
            if self.seen == self.wanted:
                self.point, self.struck_at = len(self.operations), self.steps[-1]
            self.seen += 1
        elif "for good" in self.fault:
            return getattr(durable.FileSystem, operation)(self, *arguments)
        return super()._do(operation, *arguments)


def check_failures_behind_the_steps(place: Path, num_faults: int) -> None:
    config = lab.config("checkpoint.asynchronous=true", "eval.every=null")
    noticed = 0
    for case, chance in cases(num_faults):
        fault: Fault = chance.choice(("ENOSPC", "EIO", "ENOSPC for good", "EIO for good"))
        disk = Background(chance.randrange(12), fault)
        with durable.use(disk):
            ended = lab.run(config, place / f"run{case}", after_step=disk.after_step)
        if disk.struck_at is None:
            assert ended.code == 0
            continue
        assert ended.code == 8, f"{replay(case)}: {ended}"
        assert disk.steps[-1] <= disk.struck_at + 1, replay(case)
        noticed += 1
        assert lab.go_on(config, place / f"run{case}").code == 0, replay(case)
    assert noticed >= 0.7 * num_faults


def check_what_is_written_behind_the_steps(place: Path) -> None:
    """Saves with a slow writer hold what direct saves hold."""
    many = ("steps=26", "checkpoint.every=1", "checkpoint.keep=99", "eval.every=null")
    assert lab.run(lab.config(*many, "model.dropout=0.2"), place / "direct").code == 0
    config = lab.config(*many, "model.dropout=0.2", "checkpoint.asynchronous=true")
    assert lab.run(config, place / "behind").code == 0
    steps = CheckpointStore(place / "behind" / "checkpoints").steps()
    assert len(steps) >= 25
    for step in steps:
        expected = lab.outcome(place / "direct", step=step)
        lab.assert_same(lab.outcome(place / "behind", step=step), expected, f"step {step}")


@pytest.fixture
def slow_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointStore.save_files

    def slowly(store: CheckpointStore, *state: object) -> Path:
        time.sleep(0.004)
        return save(store, *state)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "save_files", slowly)


def test_what_fails_behind_the_steps_is_heard_of_within_one_step(tmp_path):
    check_failures_behind_the_steps(tmp_path, 10)


@pytest.mark.usefixtures("slow_writer")
def test_what_is_written_behind_the_steps_is_the_state_at_its_step(tmp_path):
    check_what_is_written_behind_the_steps(tmp_path)


@pytest.mark.usefixtures("slow_writer")
def test_a_snapshot_that_shares_memory_and_a_failure_that_nobody_reads_are_noticed(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.writer.copy_files", dict)
        with pytest.raises(AssertionError, match="step"):
            check_what_is_written_behind_the_steps(tmp_path / "snapshot")
    monkeypatch.setattr(CheckpointWriter, "_finish", lambda saver: None)
    with pytest.raises(AssertionError):
        check_failures_behind_the_steps(tmp_path / "failures", 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, kilobytes in enumerate(map(int, sys.argv[2:])):
        answer = fill(Path(sys.argv[1]), kilobytes, ("stop", "continue")[number % 2])
        sys.__stdout__.write(json.dumps(answer) + "\n")
