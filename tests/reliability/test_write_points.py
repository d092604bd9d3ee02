"""Harness 1: every operation of a save, refused, torn or cut short by death.

Whatever happens at whichever operation: what loads next is the old checkpoint or the new one, bit
for bit; a save that returned is the new one; `keep` intact ones exist; the next save just works.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.reliability.faults import FAULTS, Fault, FaultyDisk, Killed
from tests.reliability.support import (
    KEEP,
    assert_is,
    intact_steps,
    leftovers,
    replay,
    save,
)
from trainer.checkpoint.status import Status, write_status
from trainer.checkpoint.store import CheckpointStore
from trainer.core import durable
from trainer.core.errors import SaveError

MIN_POINTS = 24


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A run with checkpoints 2 and 3, and rubbish of two crashes: one saving, one deleting."""
    folder = tmp_path / "before"
    save(folder, 1, 2, 3)
    for rubbish in (".tmp-step-00000004-crashed", ".trash-step-00000001-crashed"):
        (folder / rubbish).mkdir()
        (folder / rubbish / "model.safetensors").write_bytes(b"half")
    return folder


def num_points(before: Path, folder: Path) -> int:
    """Count the operations of a save that nothing disturbs."""
    shutil.copytree(before, folder)
    disk = FaultyDisk()
    with durable.use(disk):
        save(folder, 4)
    assert_is(CheckpointStore(folder).load(), 4)
    shutil.rmtree(folder)
    return len(disk.operations)


def check(folder: Path, outcome: str, fault: Fault) -> None:
    """Hold the state on disk against what the save promised."""
    kept = intact_steps(folder)
    assert len(kept) >= KEEP
    loaded = CheckpointStore(folder, KEEP).load()
    assert not loaded.messages
    assert loaded.step in ({4} if outcome == "returned" else {3, 4})
    assert_is(loaded, loaded.step)
    if outcome == "refused" and fault != "EIO for good":
        assert not [name for name in leftovers(folder) if "crashed" not in name]
    save(folder, 5)
    assert_is(CheckpointStore(folder).load(), 5)
    assert intact_steps(folder) == [kept[-1], 5]
    assert not leftovers(folder)


def attempt(folder: Path, disk: FaultyDisk) -> str:
    """Save checkpoint 4 over a failing disk."""
    try:
        with durable.use(disk):
            save(folder, 4)
    except Killed:
        return "killed"
    except SaveError as error:
        is_named = "step-00000004" in str(error) and "\n" not in str(error)
        return "refused" if is_named else f"a bad text: {error}"
    return "returned"


def test_every_fault_at_every_write_point_leaves_the_old_or_the_new_checkpoint(
    before: Path, tmp_path: Path
) -> None:
    points = num_points(before, tmp_path / "run")
    assert points >= MIN_POINTS
    cycles = {"killed": 0, "refused": 0, "returned": 0}
    for point in range(points):
        for fault in FAULTS:
            folder = tmp_path / "run"
            shutil.copytree(before, folder)
            disk = FaultyDisk(point, fault)
            outcome = attempt(folder, disk)
            assert disk.struck
            try:
                check(folder, outcome, fault)
            except Exception as error:
                raise AssertionError(f"{fault} at {point} of {disk.operations}") from error
            cycles[outcome] += 1
            shutil.rmtree(folder)
    print(f"{points} write points, {sum(cycles.values())} cycles: {cycles}")
    assert sum(cycles.values()) >= 120
    assert min(cycles.values()) > 0


def test_a_status_file_shows_the_old_or_the_new_content_after_every_fault(tmp_path: Path) -> None:
    for point in range(5):
        for fault in FAULTS:
            write_status(tmp_path, Status(state="running", step=1))
            old = (tmp_path / "status.json").read_bytes()
            disk = FaultyDisk(point, fault)
            outcome = "returned"
            try:
                with durable.use(disk):
                    write_status(tmp_path, Status(state="failed", step=2, exit_code=6))
            except Killed:
                outcome = "killed"
            except SaveError:
                outcome = "refused"
            assert disk.struck, "the write has fewer operations than this test thinks"
            changed = (tmp_path / "status.json").read_bytes() != old
            assert changed or outcome != "returned"
            assert outcome != "refused" or "EIO for good" in fault or not leftovers(tmp_path)
            durable.clean(tmp_path)
            assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_save_that_forgets_to_tidy_up_is_noticed(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "discard", lambda path: None)
    disk = FaultyDisk(6, "ENOSPC")
    outcome = attempt(before, disk)
    with pytest.raises(AssertionError):
        check(before, outcome, "ENOSPC")


def test_pruning_that_counts_damaged_checkpoints_is_noticed(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointStore, "_is_intact", lambda store, step: True)
    manifest = before / "step-00000003" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    save(before, 4)
    (before / "step-00000003").rename(before / "damaged")
    assert len(intact_steps(before)) < KEEP


def test_pruning_counts_only_intact_checkpoints(before: Path) -> None:
    weights = before / "step-00000003" / "model.safetensors"
    weights.write_bytes(b"\0" * weights.stat().st_size)
    save(before, 4)
    (before / "step-00000003").rename(before / "damaged")
    assert intact_steps(before) == [2, 4]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_sigkill_at_every_write_point_leaves_the_old_or_the_new_checkpoint(
    before: Path, tmp_path: Path
) -> None:
    points = num_points(before, tmp_path / "run")
    kills = 0
    for point in range(points):
        for fault in ("kill", "kill halfway"):
            folder = tmp_path / "run"
            shutil.copytree(before, folder)
            child = os.fork()
            if child == 0:
                attempt(folder, FaultyDisk(point, fault, for_real=True))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), replay(point)
            assert os.WTERMSIG(status) == signal.SIGKILL
            check(folder, "killed", fault)
            kills += 1
            shutil.rmtree(folder)
    print(f"{kills} processes killed")
