"""The store: what comes back is what was saved, under every shape of tensor and of trouble."""

import errno
import json
import struct
import threading
from pathlib import Path

import pytest
import torch

from tests.reliability.faults import FaultyDisk
from tests.reliability.support import assert_is, put, state
from trainer.checkpoint.store import CheckpointStore, CheckpointWriter
from trainer.checkpoint.tensor_files import DTYPES
from trainer.core import durable
from trainer.core.errors import SaveError


def store_at(path: Path, keep: int | None = None) -> CheckpointStore:
    return CheckpointStore(path / "run" / "checkpoints", keep)


RAW = torch.arange(256, dtype=torch.uint8).repeat(8)
KINDS = {str(dtype): (RAW % 2 if dtype == torch.bool else RAW).view(dtype) for dtype in DTYPES}
LAYOUTS = {
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


def test_every_dtype_keeps_its_bits_and_every_layout_its_values(tmp_path):
    tensors = {f"model.{kind}": tensor for kind, tensor in (KINDS | LAYOUTS).items()}
    store = store_at(tmp_path)
    path = put(store, 1, tensors, {})
    loaded = store.load()
    for name, tensor in tensors.items():
        back = loaded.tensors[name][...]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        assert back.is_contiguous(), name
        plain = tensor.detach().contiguous().resolve_conj().resolve_neg()
        assert torch.equal(back.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))
    # Every tensor is aligned to its own width, so that what maps the file can use it.
    raw = (path / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path):
    x = torch.zeros(2)
    for tensor in (x.to(torch.complex128), x.to_sparse(), x.to("meta")):
        with pytest.raises((TypeError, ValueError)):
            put(store_at(tmp_path), 1, {"model.x": tensor}, {})
    assert not list(tmp_path.rglob("*step*"))


def test_a_step_that_has_a_checkpoint_is_not_saved_again(tmp_path):
    store = store_at(tmp_path)
    path = put(store, 2, *state(2))
    first = (path / "manifest.json").stat().st_ino
    with pytest.raises(SaveError, match=r"step-00000002: could not be written: File exists"):
        put(store, 2, *state(2))
    assert (path / "manifest.json").stat().st_ino == first
    assert_is(store.load(), 2)
    assert [entry.name for entry in store.folder.iterdir()] == [path.name]


def test_a_refused_save_is_one_line_with_path_and_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    store = store_at(tmp_path)
    put(store, 1, *state(1))
    monkeypatch.setattr(durable.FileSystem, "write", refuse)
    text = f"{store.path(2)}: could not be written: Input/output error"
    with pytest.raises(SaveError, match=f"^{text}.*$"):
        put(store, 2, *state(2))
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]


class SlowDisk(FaultyDisk):
    """Waits at the first write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def create(self, path: Path) -> int:
        assert self.go.wait(10)
        return super().create(path)


def test_later_steps_do_not_reach_into_a_checkpoint_being_written(tmp_path):
    store, disk, (tensors, meta) = store_at(tmp_path), SlowDisk(), state(1)
    writer = CheckpointWriter(store, asynchronous=True)
    with durable.use(disk):
        assert writer.save(1, tensors, meta) is None
        for tensor in tensors.values():
            tensor.zero_()
        meta["lr"] = -1
        disk.go.set()
        assert writer.save(2, *state(2)) == store.path(1), "one is written at a time"
        assert writer.close() == store.path(2)
    for step in (1, 2):
        assert_is(store.load(step), step)
