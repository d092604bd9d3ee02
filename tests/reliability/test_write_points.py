"""Harness 1: every operation of a save, refused, torn or cut short by death."""

import itertools
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.lib.nightly import nightly
from tests.lib.run_support import read_json
from tests.reliability.faults import FAULTS, Fault, FaultyDisk, Killed
from tests.reliability.support import KEEP, assert_is, intact_steps, leftovers, save
from trainer.checkpoint.store import CheckpointStore
from trainer.core import durable
from trainer.core.errors import SaveError
from trainer.core.run_folder import RunFolder

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


def check(folder: Path, outcome: str, fault: Fault) -> None:
    """Hold the state on disk against what the save promised."""
    intact = intact_steps(folder)
    assert len(intact) >= KEEP
    loaded = CheckpointStore(folder, KEEP).load()
    assert not loaded.messages
    assert loaded.step in ({4} if outcome == "returned" else {3, 4})
    assert_is(loaded, loaded.step)
    if outcome == "refused" and fault != "EIO for good":
        assert not [name for name in leftovers(folder) if "crashed" not in name]
    save(folder, 5)
    assert_is(CheckpointStore(folder).load(), 5)
    assert intact_steps(folder) == [intact[-1], 5]
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


@pytest.mark.parametrize("faults", [2, nightly(len(FAULTS))])
def test_every_fault_at_every_write_point_leaves_the_old_or_the_new_checkpoint(
    faults, before, tmp_path
):
    """By default two of the faults at each point, every fault at one point after another."""
    folder, undisturbed = tmp_path / "run", FaultyDisk()
    assert attempt(shutil.copytree(before, folder), undisturbed) == "returned"
    points, cycles = len(undisturbed.operations), Counter[str]()
    assert points >= MIN_POINTS
    pairs = [
        (p, FAULTS[(faults * p + k) % len(FAULTS)]) for p in range(points) for k in range(faults)
    ]
    for point, fault in pairs:
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        disk = FaultyDisk(point, fault)
        outcome = attempt(folder, disk)
        assert disk.struck
        try:
            check(folder, outcome, fault)
        except Exception as error:
            raise AssertionError(f"{fault} at {point} of {disk.operations}") from error
        cycles[outcome] += 1
    print(f"{points} write points: {cycles}")
    assert cycles.keys() == {"killed", "refused", "returned"}


def test_a_status_file_shows_the_old_or_the_new_content_after_every_fault(tmp_path):
    for point, fault in itertools.product(range(5), FAULTS):
        RunFolder(tmp_path).write_status("running", 1)
        disk, outcome = FaultyDisk(point, fault), None
        try:
            with durable.use(disk):
                RunFolder(tmp_path).write_status("failed", 2, 6)
        except (Killed, SaveError) as error:
            outcome = type(error)
        assert disk.struck, "the write has fewer operations than this test thinks"
        assert read_json(tmp_path / "status.json")["step"] in ((2,) if outcome is None else (1, 2))
        assert outcome != SaveError or "EIO for good" in fault or not leftovers(tmp_path)
        durable.clean(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_pruning_counts_only_intact_checkpoints(before):
    weights = before / "step-00000003" / "model.safetensors"
    weights.write_bytes(b"\0" * weights.stat().st_size)
    save(before, 4)
    (before / "step-00000003").rename(before / "damaged")
    assert intact_steps(before) == [2, 4]
