"""Tensors that ranks hold in shards (FSDP2): which rows are here, and how they are filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeGuard, final

import torch
from torch import Tensor

if TYPE_CHECKING:  # the import costs half a second, which a run without shards need not wait for
    from torch.distributed.tensor import DTensor


class Source(Protocol):
    """A stored tensor, of which only what is asked for is read; a tensor is one as well."""

    @property
    def shape(self) -> torch.Size:
        """Sizes of its dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""

    def __getitem__(self, rows: slice | EllipsisType, /) -> Tensor:
        """Read some rows, from one number up to another, or everything."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """The rows of a distributed tensor that this rank holds.

    Attributes:
        start: the first.
        stop: the one after the last.
        replica: which of the groups that hold the same this rank is in.
        replicas: how many such groups there are.
    """

    start: int
    stop: int
    replica: int
    replicas: int


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is one rank's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Give what this rank holds of a tensor, sharing its memory."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def rows_of(tensor: DTensor) -> Place | None:
    """Tell which rows this rank holds; None where it is not rows that ranks hold."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - as above

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    num_rows = tensor.shape[0] if tensor.dim() else 1
    replica, replicas, held = 0, 1, (0, num_rows)
    for size, index, placement in zip(
        tensor.device_mesh.shape, coordinate, tensor.placements, strict=True
    ):
        if isinstance(placement, Replicate):
            replica, replicas = replica * size + index, replicas * size
        elif type(placement) is Shard and placement.dim == 0 and held == (0, num_rows):
            # Equal shards of rows, rounded up; the last ones are shorter or empty.
            most = -(-num_rows // size)
            held = min(index * most, num_rows), min((index + 1) * most, num_rows)
        else:
            return None
    return Place(*held, replica, replicas)


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make whole what ranks hold otherwise than in rows, on the CPU. Collective if any is.

    FSDP2 holds rows; an optimizer may make other states of them.
    """
    return {
        name: tensor.full_tensor().cpu()
        if is_sharded(tensor) and rows_of(tensor) is None
        else tensor
        for name, tensor in tensors.items()
    }


def fill(target: Tensor, source: Source) -> None:
    """Copy into a tensor, or into what this rank holds of it; sends nothing.

    Args:
        target: of the shape of `source`; takes no gradient.
        source: the whole tensor; only the rows held here are read of it.
    """
    if not is_sharded(target):
        target.copy_(source[...])
        return
    place = rows_of(target)
    if place is not None:
        is_all = target.to_local().shape == target.shape
        target.to_local().copy_(source[...] if is_all else source[place.start : place.stop])
        return
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - as above

    whole = source[...].to(target.device)
    mesh, placements = target.device_mesh, target.placements
    target.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
