"""Write tensors into safetensors files, and read them again, no more rows than are asked for.

The format (https://github.com/huggingface/safetensors#format): eight bytes of header length, a
JSON header, then the tensors' bytes without gaps. It is written here, straight from the tensors'
own memory through the durable seam, since a serialised copy of the weights may be what no longer
fits; reading is the library's, so every checkpoint passes two implementations.

What every rank holds whole is stored by the first rank; of a tensor in shards (FSDP2) each rank
stores its own rows, in a file named after it, and reads its own. Nothing here sends anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.manifest import DamagedError
from trainer.core import durable
from trainer.core.durable import BytesLike
from trainer.core.tensors import bits_of, in_main_memory, is_sharded, local_part, rows_of

FileTensors = Mapping[str, Mapping[str, Tensor]]
"""By name of a file, the tensors that it is to hold, by theirs."""

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Every dtype that can be stored, in safetensors' spelling."""

_BY_SPELLING = {spelling: dtype for dtype, spelling in DTYPES.items()}


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor on disk, of which only what is asked for is read."""

    shape: torch.Size
    dtype: torch.dtype  # that it is read in
    # safetensors' slices, whose rows follow each other; they keep the file mapped, so that a
    # reader survives the deletion of what it reads.
    parts: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read rows `start:stop`, or all with `...`; perhaps the file's own memory: do not write.

        The result is on the CPU.
        """
        if len(self.parts) == 1:
            whole: Tensor = self.parts[0][rows]
            return whole.to(self.dtype)
        # Of several files only those that have some of the rows are read.
        start, stop = (0, self.shape[0]) if rows is ... else (rows.start, rows.stop)
        found, first = [], 0
        for part in self.parts:
            last = first + part.get_shape()[0]
            if start < last and first < stop:
                found.append(part[max(start - first, 0) : min(stop, last) - first])
            first = last
        # A rank of a short tensor may hold no row of it.
        if not found:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return torch.cat(found).to(self.dtype)

    def identity(self) -> str:
        """Give its form alone."""
        return f"{self.dtype} {[*self.shape]}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor | StoredTensor]) -> tuple[int, str]:
    """Write one new safetensors file durably, tensor by tensor; gives size and SHA-256.

    The tensors are of dtypes in `DTYPES`; any layout in memory, any device, any size.
    """
    # Wide dtypes first keep every tensor aligned to its own width.
    widest_first = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
    return durable.write_file(path, _pieces(dict(widest_first)))


def open_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """List the tensors of safetensors files, unread; rows of one in several follow each other."""
    parts: dict[str, list[Any]] = {}
    for path in paths:
        try:
            file: Any = safe_open(path, "pt")
        except (SafetensorError, ValueError, KeyError) as error:
            raise DamagedError(f"{path.name} is not a safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - no mapping
            parts.setdefault(name, []).append(file.get_slice(name))
    return {name: _join(name, found) for name, found in parts.items()}


def _join(name: str, parts: list[Any]) -> StoredTensor:
    spelling, shape = parts[0].get_dtype(), parts[0].get_shape()
    if spelling not in _BY_SPELLING:
        raise DamagedError(f"{name!r:.80} has the unsupported dtype {spelling!r:.80}")
    if len(parts) > 1:
        kinds = {(part.get_dtype(), *part.get_shape()[1:]) for part in parts}
        if len(kinds) > 1 or not all(part.get_shape() for part in parts):
            raise DamagedError(f"the shards of {name!r:.80} do not match")
        shape = [sum(part.get_shape()[0] for part in parts), *shape[1:]]
    return StoredTensor(torch.Size(shape), _BY_SPELLING[spelling], tuple(parts))


def _pieces(tensors: Mapping[str, Tensor | StoredTensor]) -> Iterator[BytesLike]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        kind = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors begin where any of their types may.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in in_main_memory(tensor[...] for tensor in tensors.values()):
        if tensor.nbytes:
            yield bits_of(tensor).numpy().data


def assign_files(tensors: Mapping[str, Tensor], rank: int) -> FileTensors:
    """Decide which files a rank writes, and what into them; the ranks together write everything.

    Every rank gives the same names, whose first word decides on the file. Nothing is copied.
    """
    files: dict[str, dict[str, Tensor]] = {}
    num_sharded = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(f"{name}: only dense tensors can be stored")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: safetensors has no {tensor.dtype}")
        head = name.partition(".")[0]
        file = head if head in {"model", "optimizer"} else "state"
        if not is_sharded(tensor):
            if rank == 0:
                files.setdefault(f"{file}.safetensors", {})[name] = tensor
            continue
        rows = rows_of(tensor)
        assert rows is not None, "tensors must be sharded along dimension 0, or not at all"
        # Ranks hold rows in the order of their numbers, and so do files that are sorted by name.
        # Copies of the shards (HSDP) take turns, so that all of them write as much.
        is_turn = num_sharded % rows.num_replicas == rows.replica
        num_sharded += 1
        if is_turn and rows.start < rows.stop:
            files.setdefault(f"{file}-rank-{rank:05d}.safetensors", {})[name] = local_part(tensor)
    return files
