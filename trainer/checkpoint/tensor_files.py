"""Tensors as safetensors files, written piece by piece.

The format (https://github.com/huggingface/safetensors#format): eight bytes of header length, a
JSON header, then the tensors' bytes without gaps. It is written here, straight from the tensors'
own memory through the durable seam, since a serialised copy of the weights may be what no longer
fits; reading (`trainer.checkpoint.tensor_reader`) is the library's, so every checkpoint passes two
implementations.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from trainer.checkpoint.dtensors import Source
from trainer.checkpoint.manifest import Slice
from trainer.checkpoint.rank_pieces import Piece, aliases_of
from trainer.core import durable
from trainer.core.bits import bits_of
from trainer.core.durable import Bytes, Written

SHARD_BYTES = 4 << 30

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


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank wrote of a checkpoint.

    Attributes:
        files: all of them.
        slices: by name of the tensor, the rows that one of them holds.
    """

    files: Mapping[str, Written]
    slices: Mapping[str, Slice]


def write(
    folder: Path,
    pieces: Mapping[str, Piece],
    *,
    rank: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> Part:
    """Write what a rank stores into `model`, `optimizer` and `state` shards, durably.

    Rows go into files that are named after the rank, apart from whole tensors.

    Args:
        folder: an existing folder of the run's own.
        pieces: by name; the first word of a name decides on the file. Any layout in memory, any
            device, any dtype of `DTYPES`, any size including none; tied ones are stored once.
        rank: this one.
        shard_bytes: a file is split before it exceeds this, where it holds several tensors.

    Raises:
        TypeError: something is no dense tensor of such a dtype; nothing was written.
        OSError: the disk refused.
    """
    aliases = aliases_of(pieces)
    own: dict[str, Tensor] = {}
    for name, piece in pieces.items():
        if piece.rows is not None and name not in aliases:
            _check_storable(name, piece.rows)
            own[name] = piece.rows
    partial = {name for name in own if not pieces[name].is_whole}
    groups = {
        "": {name: rows for name, rows in own.items() if name not in partial},
        f"-rank-{rank:05d}": {name: rows for name, rows in own.items() if name in partial},
    }
    files: dict[str, Written] = {}
    slices: dict[str, Slice] = {}
    for suffix, tensors in groups.items():
        for file, names in _files(tensors, shard_bytes, suffix).items():
            files[file] = write_shard(folder / file, {name: tensors[name] for name in names})
            slices |= {name: _slice(pieces[name], file) for name in names}
    return Part(files=files, slices=slices)


def write_shard(path: Path, tensors: Mapping[str, Source]) -> Written:
    """Write one new safetensors file, durably; one tensor after the other is read for it."""
    # Wide dtypes first keep every tensor aligned to its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return durable.write_file(path, _bytes({name: tensors[name] for name in names}))


def _slice(piece: Piece, file: str) -> Slice:
    num_rows = piece.rows.shape[0] if piece.rows is not None and piece.rows.dim() else 1
    return Slice(file, piece.start, piece.start + num_rows)


def _check_storable(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.is_meta:
        raise TypeError(
            f"{name}: {tensor.dtype}, {tensor.layout}, {tensor.device} cannot be stored; "
            f"a checkpoint holds dense tensors of {', '.join(sorted(DTYPES.values()))}"
        )


def _files(tensors: Mapping[str, Tensor], shard_bytes: int, suffix: str) -> dict[str, list[str]]:
    """Deal tensors to files, in order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        head = name.partition(".")[0]
        groups[head if head in {"model", "optimizer"} else "state"].append(name)
    files: dict[str, list[str]] = {}
    for group, names in groups.items():
        shards = _split(names, tensors, shard_bytes)
        for index, shard in enumerate(shards, start=1):
            part = "" if len(shards) == 1 else f"-{index:05d}-of-{len(shards):05d}"
            files[f"{group}{suffix}{part}.safetensors"] = shard
    return files


def _split(names: list[str], tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in names:
        size = tensors[name].nbytes
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _bytes(tensors: Mapping[str, Source]) -> Iterator[Bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.shape.numel() > 0:
            yield _memory(tensor[...])


def _memory(tensor: Tensor) -> memoryview:
    return bits_of(tensor.cpu()).numpy().data
