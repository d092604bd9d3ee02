"""The lock of a run folder, and the status that tells by it whether a run is alive."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.lib.run_support import in_use
from trainer.checkpoint.lock import RunInUseError, hold, is_locked
from trainer.checkpoint.status import Status, read_status, write_status
from trainer.core.errors import SaveError


def hold_and_wait(run: Path, pipe: Connection) -> None:
    with hold(run):
        pipe.send("held")
        pipe.recv()


def test_a_run_is_held_by_one_process_and_free_when_that_dies(tmp_path: Path) -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    holder = multiprocessing.get_context("spawn").Process(
        target=hold_and_wait, args=(tmp_path, there)
    )
    holder.start()
    assert here.recv() == "held"
    with pytest.raises(RunInUseError, match=f"in use by process {holder.pid} on") as refusal:
        hold(tmp_path).__enter__()
    assert refusal.value.exit_code == 4
    assert "\n" not in str(refusal.value)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    holder.close()
    here.close()
    there.close()
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()


def test_the_process_that_holds_a_run_may_hold_it_again(tmp_path: Path) -> None:
    with hold(tmp_path):
        with hold(tmp_path):
            pass
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_that_outlives_its_parent_does_not_hold_the_run(tmp_path: Path) -> None:
    with hold(tmp_path):
        lock = (tmp_path / ".lock").stat().st_ino
        worker = os.fork()
        if worker == 0:
            os._exit(lock in open_files())
        assert lock in open_files()
        assert os.waitpid(worker, 0)[1] == 0


def open_files() -> list[int]:
    """List the inodes this process has open."""
    found = []
    for handle in range(256):
        with contextlib.suppress(OSError):
            found.append(os.fstat(handle).st_ino)
    return found


@pytest.mark.parametrize("text", [b"", b"nonsense", b"[]", b'{"pid": "x"}', b"\xff"])
def test_a_lock_file_that_lies_around_means_nothing(text: bytes, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(text)
    with hold(tmp_path):
        pass
    with in_use(tmp_path):
        (tmp_path / ".lock").write_bytes(text)
        with pytest.raises(RunInUseError, match="in use by another process"):
            hold(tmp_path).__enter__()


def test_a_run_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="No such file or directory"):
        hold(tmp_path / "nowhere").__enter__()
    (tmp_path / "target").touch()
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(SaveError, match=r"\.lock: could not be written"):
        hold(tmp_path).__enter__()
    assert (tmp_path / "target").read_bytes() == b""


def test_holding_a_run_clears_what_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / ".tmp-status.json-1").write_bytes(b"{")
    (tmp_path / "metrics.jsonl").touch()
    with hold(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "metrics.jsonl"]


def test_a_run_on_a_full_disk_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        holding = contextlib.ExitStack()
        holding.enter_context(hold(tmp_path))
    with holding:
        assert is_locked(tmp_path)


def test_a_file_system_without_locks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(SaveError, match="cannot be locked on this file system"):
        contextlib.ExitStack().enter_context(hold(tmp_path))
    assert (tmp_path / ".lock").stat().st_ino not in open_files()
    write_status(tmp_path, Status(state="running"))
    assert read_status(tmp_path)["state"] == "failed"


def test_the_status_is_json_for_scripts(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="running"))
    write_status(tmp_path, Status(state="failed", exit_code=6, step=9, reason="not finite"))
    assert json.loads((tmp_path / "status.json").read_bytes()) == {
        "state": "failed",
        "exit_code": 6,
        "step": 9,
        "reason": "not finite",
    }
    with pytest.raises(SaveError, match=r"status\.json"):
        write_status(tmp_path / "nowhere", Status(state="running"))


def test_a_run_that_nobody_holds_is_not_read_as_running(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {}
    with hold(tmp_path):
        write_status(tmp_path, Status(state="running", step=4))
        assert read_status(tmp_path)["state"] == "running"
    found = read_status(tmp_path)
    assert (found["state"], found["step"], found["reason"]) == (
        "failed",
        4,
        "its process was killed",
    )
    write_status(tmp_path, Status(state="completed", exit_code=0, step=9))
    assert read_status(tmp_path)["state"] == "completed"
    (tmp_path / "status.json").write_text("[")
    assert read_status(tmp_path) == {}
