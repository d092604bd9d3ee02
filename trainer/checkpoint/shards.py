"""Tensors as safetensors files: written piece by piece, read back only after verification.

The format (https://github.com/huggingface/safetensors#format): eight bytes of header length, a
JSON header, then the tensors' bytes without gaps. It is written here, straight from the tensors'
own memory through the durable seam, since a serialised copy of the weights may be what no longer
fits; reading is the library's, so every checkpoint passes two implementations.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer import durable
from trainer.checkpoint.manifest import DamagedError, Shape
from trainer.durable import Bytes, Written

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
    """What one rank wrote of a checkpoint; the fields are those of the manifest."""

    files: Mapping[str, Written]
    tensors: Mapping[str, Shape]
    aliases: Mapping[str, str]


def write(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> Part:
    """Write tensors into a folder as `model`, `optimizer` and `state` shards, durably.

    Args:
        folder: an existing folder of one's own.
        tensors: by name; the first word of a name decides on the file. Any layout in memory, any
            device, any dtype of `DTYPES`, any size including none; tied ones are stored once.
        shard_bytes: a file is split before it exceeds this, where it holds several tensors.

    Raises:
        TypeError: something is no dense tensor of such a dtype; nothing was written.
        OSError: the disk refused.
    """
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    aliases = find_aliases(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    files: dict[str, Written] = {}
    shapes: dict[str, Shape] = {}
    for file, names in _files(stored, shard_bytes).items():
        shard = {name: stored[name] for name in names}
        files[file] = write_shard(folder / file, shard)
        shapes |= {name: shape_of(tensor, file) for name, tensor in shard.items()}
    return Part(files=files, tensors=shapes, aliases=aliases)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write one new safetensors file, durably."""
    # Wide dtypes first keep every tensor aligned to its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return durable.write_file(path, _pieces({name: tensors[name] for name in names}))


def read(folder: Path, files: Iterable[str], tensors: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Read the tensors of verified files.

    Raises:
        DamagedError: the files do not hold exactly these tensors, with these shapes and dtypes.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        shard = read_file(folder / file)
        expected = {name: shape for name, shape in tensors.items() if shape.file == file}
        if {name: shape_of(tensor, file) for name, tensor in shard.items()} != expected:
            raise DamagedError(f"{file} holds other tensors than the manifest says")
        found |= shard
    return found


def read_file(path: Path) -> dict[str, Tensor]:
    """Read one safetensors file.

    Raises:
        DamagedError: it is none.
    """
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedError(f"{path.name} is not a safetensors file: {error}") from error


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the names that show the very same memory as an earlier one.

    Returns:
        For every further name the first one. Tensors that overlap in part are not aliases.
    """
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        memory = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        kept = first.setdefault(memory, name)
        if kept != name:
            aliases[name] = kept
    return aliases


def shape_of(tensor: Tensor, file: str) -> Shape:
    """Describe a tensor as the manifest does."""
    return Shape(tuple(tensor.shape), DTYPES[tensor.dtype], file)


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Add up what tensors take on disk, aliases counted once."""
    aliases = find_aliases(tensors)
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in aliases)


def _check_storable(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {type(tensor).__qualname__} is no tensor")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.is_meta:
        raise TypeError(
            f"{name}: {tensor.dtype}, {tensor.layout}, {tensor.device} cannot be stored; "
            f"a checkpoint holds dense tensors of {', '.join(sorted(DTYPES.values()))}"
        )


def _files(tensors: Mapping[str, Tensor], shard_bytes: int) -> dict[str, list[str]]:
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
            files[f"{group}{part}.safetensors"] = shard
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


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[Bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
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
        if tensor.numel() > 0:
            yield _memory(tensor)


def _memory(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
