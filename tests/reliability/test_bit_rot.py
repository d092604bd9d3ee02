"""Harness 5: files change behind the program's back. Nothing changed is ever loaded."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lib.nightly import counts
from tests.reliability.faults import FaultyDisk
from tests.reliability.support import assert_is, cases, intact_steps, replay, save
from trainer.checkpoint.manifest import dump, parse_manifest
from trainer.checkpoint.store import CheckpointStore
from trainer.core import durable
from trainer.core.errors import NoCheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints 1 and 2."""
    save(tmp_path / "checkpoints", 1, 2)
    return tmp_path / "checkpoints"


def newest(folder: Path, name: str = "") -> Path:
    return folder / "step-00000002" / name


def assert_older_is_used(folder: Path) -> None:
    loaded = CheckpointStore(folder).load(set_aside=False)
    assert_is(loaded, 1)
    assert len(loaded.messages) == 1
    assert "step-00000002: damaged: " in loaded.messages[0]
    assert "\n" not in loaded.messages[0]


@counts(200, 5000)
def test_no_flipped_bit_is_accepted(count, folder):
    for case, chance in cases(count):
        path = chance.choice(sorted(newest(folder).iterdir()))
        whole = path.read_bytes()
        position, bit = chance.randrange(len(whole)), chance.randrange(8)
        flipped = bytearray(whole)
        flipped[position] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            assert_older_is_used(folder)
        except Exception as error:
            spot = f"bit {bit} of byte {position} of {path.name}"
            raise AssertionError(f"{spot}; {replay(case)}") from error
        path.write_bytes(whole)
    assert_is(CheckpointStore(folder).load(), 2)


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def truncated(share: float) -> Callable[[Path], object]:
    return rewritten(lambda whole: whole[: int(len(whole) * share)])


longer = rewritten(lambda whole: whole + b"\0")
zero_tailed = rewritten(lambda whole: whole[: len(whole) // 2].ljust(len(whole), b"\0"))


def a_stranger_beside_it(path: Path) -> None:
    path.with_name("optimizer-00002-of-00002.safetensors").write_bytes(path.read_bytes())


def another_step(path: Path) -> None:
    shutil.rmtree(path.parent)
    shutil.copytree(path.parents[1] / "step-00000001", path.parent)


DAMAGES = [
    *(*map(truncated, (0.0, 0.5, 0.99)), longer, zero_tailed, Path.unlink),
    *(a_stranger_beside_it, another_step),
]
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.safetensors")


def test_a_damaged_file_sends_the_load_to_the_older_checkpoint(folder):
    backup = shutil.copytree(folder, folder.with_name("backup"))
    for name, damage in itertools.product(FILES, DAMAGES):
        damage(newest(folder, name))
        assert_older_is_used(folder)
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
    assert_is(CheckpointStore(folder).load(), 2)


def test_the_damaged_one_is_set_aside_and_named_and_makes_room(folder):
    longer(newest(folder, "model.safetensors"))
    with durable.use(FaultyDisk(0, "EIO for good")):
        assert "could not be set aside" in CheckpointStore(folder).load().messages[0]
    loaded = CheckpointStore(folder).load()
    assert_is(loaded, 1)
    (message,) = loaded.messages
    assert message.endswith("; set aside as damaged-step-00000002")
    assert "model.safetensors has " in message
    assert (folder / "damaged-step-00000002" / "model.safetensors").exists()
    assert CheckpointStore(folder).load().messages == ()
    save(folder, 2)
    assert intact_steps(folder) == [1, 2]


def test_with_none_intact_there_is_one_line_and_no_checkpoint(folder):
    for step in CheckpointStore(folder).steps():
        (CheckpointStore(folder).path(step) / "model.safetensors").unlink()
    with pytest.raises(NoCheckpointError, match=r"no intact checkpoint: .*step-00000002.*missing"):
        CheckpointStore(folder).load()
    with pytest.raises(NoCheckpointError, match="no checkpoint here"):
        CheckpointStore(folder).load()


def test_another_format_is_named_and_nothing_is_touched(folder):
    path = newest(folder, "manifest.json")
    manifest = parse_manifest(path.read_bytes())
    path.write_bytes(dump(manifest.model_copy(update={"format_version": 5})))
    refusal = r"checkpoint format 5, and this version reads format 4: use the version that wrote"
    with pytest.raises(NoCheckpointError, match=refusal):
        CheckpointStore(folder).load()
    assert CheckpointStore(folder).steps() == [1, 2]
