"""What is in a run's folder, the lock, and the status that tells by it whether a run is alive."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.run_support import in_use
from tests.reliability import lab
from trainer.core.errors import SaveError
from trainer.core.rank_progress import RankPosition, RankProgress
from trainer.core.run_folder import RunFolder, RunInUseError, hold, is_locked, step_of
from trainer.report import heartbeat

HOLDS = """
import sys
from pathlib import Path
from trainer.core.run_folder import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_held_by_one_process_and_free_when_that_dies(tmp_path):
    typed = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(typed, cwd=CHECKOUT, **pipes) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunInUseError, match=f"in use by process {holder.pid} on") as refusal:
            hold(tmp_path).__enter__()
        holder.kill()
    assert refusal.value.exit_code == 4
    assert "\n" not in str(refusal.value)
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()


def test_the_process_that_holds_a_run_may_hold_it_again_and_clears_what_a_crash_left(tmp_path):
    (tmp_path / ".tmp-status.json-1").write_bytes(b"{")
    (tmp_path / "metrics.jsonl").touch()
    with hold(tmp_path):
        with hold(tmp_path):
            pass
        assert is_locked(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "metrics.jsonl"]
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("text", [b"[]", b'{"pid": "x"}', b"{}"])
def test_a_lock_file_that_lies_around_means_nothing(text, tmp_path):
    (tmp_path / ".lock").write_bytes(text)
    with hold(tmp_path):
        pass
    with in_use(tmp_path):
        (tmp_path / ".lock").write_bytes(text)
        with pytest.raises(RunInUseError, match="in use by another process"):
            hold(tmp_path).__enter__()


def test_a_run_that_cannot_be_written_to_or_locked_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(SaveError, match="No such file or directory"):
        hold(tmp_path / "nowhere").__enter__()
    (tmp_path / "target").touch()
    lock = tmp_path / ".lock"
    lock.symlink_to(tmp_path / "target")
    with pytest.raises(SaveError, match=r"\.lock: could not be written"):
        hold(tmp_path).__enter__()
    assert (tmp_path / "target").read_bytes() == b""
    lock.unlink()

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(SaveError, match=r"\.lock: could not be written: No locks available"):
        hold(tmp_path).__enter__()
    assert str(lock) not in [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    RunFolder(tmp_path).write_status("running", 0)
    assert RunFolder(tmp_path).status()["state"] == "failed"


def test_the_status_is_json_for_scripts_and_running_only_while_somebody_holds_the_run(tmp_path):
    run = RunFolder(tmp_path)
    assert run.status() == {}
    with hold(tmp_path):
        run.write_status("running", 4)
        assert run.status()["state"] == "running"
    killed = {"state": "failed", "step": 4, "reason": "its process was killed"}
    assert killed.items() <= run.status().items()
    run.write_status("failed", 9, 6, "not finite")
    ended = {"state": "failed", "exit_code": 6, "step": 9, "reason": "not finite"}
    found = json.loads((tmp_path / "status.json").read_bytes())
    assert time.time() - found.pop("time") < 60
    assert found == ended
    assert run.last_step() == 9
    (tmp_path / "status.json").write_text("[")
    assert (run.status(), run.last_step()) == ({}, 0)
    with pytest.raises(SaveError, match=r"status\.json"):
        RunFolder(tmp_path / "nowhere").write_status("running", 0)


def test_a_thread_says_for_a_watchdog_where_a_run_is_and_when_its_last_step_ended(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.01)
    run, progress = RunFolder(tmp_path), RankProgress()
    with hold(tmp_path):
        run.write_status("running", 0)
        progress.write(RankPosition(step=7, phase="data"))
        began = time.time()
        progress.write(RankPosition(step=7, phase="compute", micro_batch=2))
        with heartbeat.heartbeat(lab.config(), tmp_path, progress):
            until = time.monotonic() + 30
            while "at" not in run.status() and time.monotonic() < until:
                time.sleep(0.01)
        beat = run.status()
        assert beat["at"] == "step 7 (compute, micro-batch 2)"
        assert beat["last_step_time"] == pytest.approx(began, abs=5)
        assert beat["last_step_time"] <= beat["time"]
        assert beat["last_step_time"] == progress.read().step_since, "which moves with steps alone"
        run.write_status("completed", 7, 0)
        run.refresh_status(progress.read())
        assert run.status()["state"] == "completed"
        assert "at" not in run.status()


def test_checkpoints_are_those_with_a_manifest_and_the_name_of_a_step(tmp_path):
    run = RunFolder(tmp_path)
    others = ("step-4", "step-000000005", "damaged-step-00000006")
    for name in ("step-00000010", "step-100000000", *others):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    run.checkpoint(11).mkdir()  # that no process finished
    assert run.steps() == [10, 100_000_000]
    assert [step_of(run.checkpoint(step)) for step in run.steps()] == run.steps()


def test_what_was_typed_is_that_of_the_latest_start_whose_record_is_whole(tmp_path):
    run, latest = RunFolder(tmp_path), tmp_path / ".hydra" / "resumed" / "overrides.yaml"
    assert (run.config(), run.typed()) == ({}, [])
    latest.parent.mkdir(parents=True)
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[+steps=2, seed=1]")
    latest.touch()  # its process was killed before it wrote
    assert run.typed() == ["steps=2", "seed=1"]
    latest.write_text("[steps=4]")
    assert (run.typed(), run.typed(first=True)) == (["steps=4"], ["steps=2", "seed=1"])


def test_a_run_begins_once(tmp_path):
    run = RunFolder(tmp_path)
    assert run.began() == 0
    run.record_start()
    began = run.began()
    run.record_start()
    assert run.began() == began > 0
