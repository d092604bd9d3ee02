"""Find the rows that a rank holds of tensors in shards (FSDP2), to store and to fill them.

What every rank holds whole is stored by the first rank; of a tensor in shards each rank stores its
own rows, in a file named after it. Nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from trainer.checkpoint.tensor_files import DTYPES, StoredTensor

if TYPE_CHECKING:  # the import costs half a second, which a run without shards need not wait for
    from torch.distributed.tensor import DTensor

FileTensors = Mapping[str, Mapping[str, Tensor]]
"""By name of a file, the tensors that it is to hold, by theirs."""


class RowRange(NamedTuple):
    """The rows of a tensor in shards that this rank holds.

    Attributes:
        start: the first.
        stop: the one after the last.
        replica: which of the groups of ranks that hold the same this rank is in.
        num_replicas: how many such groups there are; more than one under HSDP.
    """

    start: int
    stop: int
    replica: int
    num_replicas: int


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is one rank's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def rows_of(tensor: DTensor) -> RowRange | None:
    """Compute which rows this rank holds; None where the ranks hold something else than rows."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - as above

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    num_rows = tensor.shape[0] if tensor.dim() else 1
    rows, replica, num_replicas = (0, num_rows), 0, 1
    for size, index, placement in zip(
        tensor.device_mesh.shape, coordinate, tensor.placements, strict=True
    ):
        if isinstance(placement, Replicate):
            replica, num_replicas = replica * size + index, num_replicas * size
        elif type(placement) is Shard and placement.dim == 0 and rows == (0, num_rows):
            # Equal shards of rows, rounded up; the last ones are shorter or empty.
            most = -(-num_rows // size)
            rows = min(index * most, num_rows), min((index + 1) * most, num_rows)
        else:
            return None
    return RowRange(*rows, replica, num_replicas)


def assign_files(tensors: Mapping[str, Tensor], rank: int) -> FileTensors:
    """Decide which files a rank writes, and what into them; the ranks together write everything.

    Args:
        tensors: by name, the same names on every rank; the first word decides on the file.
        rank: this one.

    Returns:
        Tensors that share the memory of those given.

    Raises:
        TypeError: something is no dense tensor of a dtype that can be stored.
    """
    files: dict[str, dict[str, Tensor]] = {}
    num_sharded = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(f"{name}: a tensor without dense memory cannot be stored")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: safetensors has no {tensor.dtype}")
        head = name.partition(".")[0]
        file = head if head in {"model", "optimizer"} else "state"
        if not is_sharded(tensor):
            if rank == 0:
                files.setdefault(f"{file}.safetensors", {})[name] = tensor
            continue
        rows = rows_of(tensor)
        assert rows is not None, "captured tensors are in rows, or whole"
        # Ranks hold rows in the order of their numbers, and so do files that are sorted by name.
        is_turn = num_sharded % rows.num_replicas == rows.replica
        num_sharded += 1
        if is_turn and rows.start < rows.stop:
            files.setdefault(f"{file}-rank-{rank:05d}.safetensors", {})[name] = local_part(tensor)
    return files


def copy_files(files: FileTensors) -> FileTensors:
    """Copy tensors to the CPU, out of reach of later steps."""
    return {
        file: {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        for file, tensors in files.items()
    }


def fill(target: Tensor, source: Tensor | StoredTensor) -> None:
    """Copy into a tensor, or into what this rank holds of it.

    Args:
        target: of the shape of `source`, whole or in rows; takes no gradient.
        source: the whole tensor; only the rows held here are read of it.
    """
    if not is_sharded(target):
        target.copy_(source[...])
        return
    rows = rows_of(target)
    assert rows is not None, "parameters are in rows"
    own = target.to_local()
    is_whole = own.shape == target.shape
    own.copy_(source[...] if is_whole else source[rows.start : rows.stop])
