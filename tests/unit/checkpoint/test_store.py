"""The store: what comes back is what was saved, under every shape of tensor and of trouble."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.reliability.faults import FAULTS, FaultyDisk, Killed
from tests.reliability.support import assert_is, state
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tensor_files import DTYPES
from trainer.checkpoint.writer import CheckpointWriter
from trainer.core import durable
from trainer.core.errors import NoCheckpointError, SaveError


def store_at(path: Path, keep: int | None = None) -> CheckpointStore:
    return CheckpointStore(path / "run" / "checkpoints", keep)


def there_and_back(path: Path, tensor: Tensor) -> Tensor:
    store = store_at(path)
    store.save(1, {"model.x": tensor}, {})
    return store.load().read("model.x")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(8)
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = raw.view(dtype)
    back = there_and_back(tmp_path, tensor)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), raw)


AWKWARD = {
    "0-d": torch.tensor(3.5),
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(4, 0, 2),
    "transposed": torch.randn(4, 3).t(),
    "sliced": torch.randn(10, 4)[2:8:2, 1:3],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 3).expand(4, 3),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    "with a gradient": torch.randn(3, requires_grad=True),
    "flipped": torch.randn(2, 3).bfloat16().flip(0),
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_every_layout_comes_back_with_its_values(kind: str, tmp_path: Path) -> None:
    tensor = AWKWARD[kind]
    back = there_and_back(tmp_path, tensor)
    assert torch.equal(back, tensor)
    assert back.shape == tensor.shape
    assert back.is_contiguous()


def test_every_tensor_is_aligned_to_its_own_width(tmp_path: Path) -> None:
    tensors = {
        "model.a": torch.ones(3, dtype=torch.uint8),
        "model.b": torch.ones(3, dtype=torch.float64),
        "model.c": torch.ones(1, dtype=torch.bfloat16),
    }
    raw = (store_at(tmp_path).save(1, tensors, {}) / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    assert length % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % tensors[name].element_size() == 0


def test_the_manifest_is_readable_and_complete(tmp_path: Path) -> None:
    path = store_at(tmp_path).save(40, *state(40))
    assert path.name == "step-00000040"
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format_version"] == 3
    assert manifest["step"] == 40
    assert manifest["files"].keys() == {p.name for p in path.glob("*.safetensors")}
    size = (path / "model.safetensors").stat().st_size
    assert manifest["files"]["model.safetensors"]["size"] == size
    assert load_file(path / "model.safetensors").keys() == {n for n in state(40)[0] if "model" in n}


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({"model.x": torch.zeros(2, dtype=torch.complex128)}, {}),
        ({"model.x": torch.zeros(2).to_sparse()}, {}),
        ({"model.x": torch.zeros(2, device="meta")}, {}),
        ({}, {"x": object()}),
        ({}, {"x": float("nan")}),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    tensors: dict[str, Any], meta: dict[str, Any], tmp_path: Path
) -> None:
    store = store_at(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        store.save(1, tensors, meta)
    assert not list(tmp_path.rglob("*step*"))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path, keep=2)
    for step in (5, 10, 100_000_000, 123_456_789):
        store.save(step, *state(step))
    assert store.steps() == [100_000_000, 123_456_789]
    assert_is(store.load(), 123_456_789)
    assert_is(store.load(100_000_000), 100_000_000)
    everything = store_at(tmp_path / "all")
    for step in range(4):
        everything.save(step, *state(step))
    assert everything.steps() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="at least 1"):
        store_at(tmp_path, keep=0)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with pytest.raises(NoCheckpointError, match="no checkpoint here"):
        store.load()
    store.save(2, *state(2))
    store.save(4, *state(4))
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 3; has 2, 4"):
        store.load(3)


def test_the_same_state_again_leaves_the_first_and_another_state_is_refused(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path)
    path = store.save(2, *state(2))
    first = (path / "manifest.json").stat().st_ino
    tensors, meta = state(2)
    assert store.save(2, {**tensors, "rng.cpu": torch.zeros(3)}, meta) == path
    assert (path / "manifest.json").stat().st_ino == first
    with pytest.raises(SaveError, match="never overwritten"):
        store.save(2, {**tensors, "model.scale": tensors["model.scale"] + 1}, meta)
    assert_is(store.load(), 2)
    assert [entry.name for entry in store.folder.iterdir()] == [path.name]


def test_names_that_only_look_like_checkpoints_are_left_alone(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.save(1, *state(1))
    for name in (
        "step-1",
        "step-00000001x",
        "step-" + "\N{ARABIC-INDIC DIGIT FIVE}" * 8,
        "step-0000000002",
        "notes",
    ):
        (store.folder / name).mkdir()
    assert store.steps() == [1]


def test_a_reader_renames_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.save(1, *state(1))
    os.truncate(store.save(2, *state(2)) / "model.safetensors", 3)
    before = sorted(store.folder.rglob("*"))
    assert_is(store.load(set_aside=False), 1)
    assert sorted(store.folder.rglob("*")) == before


def test_a_reader_survives_pruning_by_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = store_at(tmp_path, keep=1), store_at(tmp_path)
    writer.save(1, *state(1))
    read = CheckpointStore._read

    def overtaken(store: CheckpointStore, step: int, *more: Any) -> object:
        if step == 1:
            writer.save(2, *state(2))
        return read(store, step, *more)

    monkeypatch.setattr(CheckpointStore, "_read", overtaken)
    assert_is(reader.load(set_aside=False), 2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_refused_save_is_one_line_with_path_and_reason(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(disk: durable.FileSystem, handle: int, data: memoryview) -> int:
        raise OSError(code, os.strerror(code))

    store = store_at(tmp_path)
    store.save(1, *state(1))
    monkeypatch.setattr(durable.FileSystem, "write", refuse)
    with pytest.raises(SaveError) as refusal:
        store.save(2, *state(2))
    text = str(refusal.value)
    assert text.startswith(f"{store.path(2)}: could not be written: {os.strerror(code)}")
    assert "\n" not in text
    said = re.search(r" \(needs \d+ B, [\d.]+ [KMGT]iB free\): make room, lower checkpoint", text)
    assert (said is not None) == (code in {errno.ENOSPC, errno.EDQUOT})
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]


class SlowDisk(FaultyDisk):
    """Waits at the first write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def create(self, path: Path) -> int:
        assert self.go.wait(10)
        return super().create(path)


def test_later_steps_do_not_reach_into_a_checkpoint_being_written(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = CheckpointWriter(store, asynchronous=True)
    for step in range(10):
        tensors, meta = state(step)
        disk = SlowDisk()
        with durable.use(disk):
            writer.save(step, tensors, meta)
            assert writer.take_saved() is None
            for tensor in tensors.values():
                tensor.zero_()
            meta["lr"] = -1
            disk.go.set()
            assert writer.close() == store.path(step)
        assert_is(store.load(), step)
        writer = CheckpointWriter(store, asynchronous=True)
    writer.close()


@pytest.mark.parametrize("when", ["news", "save", "close"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.startswith(("E", "kill"))])
def test_a_failed_background_write_surfaces_at_the_next_call(
    when: str, fault: Any, tmp_path: Path
) -> None:
    store = store_at(tmp_path)
    writer = CheckpointWriter(store, asynchronous=True)
    with durable.use(FaultyDisk(5, fault)):
        writer.save(1, *state(1))
        with pytest.raises((SaveError, Killed)):
            call(writer, when)
        with contextlib.suppress(SaveError, Killed):
            writer.close()
    is_passing = when == "save" and fault in {"ENOSPC", "EIO"}
    assert store.steps() == ([2] if is_passing else []), "a later state is saved if it can be"


def call(writer: CheckpointWriter, when: str) -> None:
    if when == "close":
        writer.close()
    elif when == "save":
        writer.save(2, *state(2))
    else:
        while not writer.has_news:
            time.sleep(0.005)
        writer.wait()


def test_one_write_is_in_flight_at_a_time(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = CheckpointWriter(store, asynchronous=True)
    for step in range(5):
        writer.save(step, *state(step))
    assert writer.close() == store.path(4)
    assert store.steps() == [0, 1, 2, 3, 4]
