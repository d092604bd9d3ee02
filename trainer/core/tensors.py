"""Tell how tensors are laid out, fill the part that is here, and view memory as integers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard, final

import torch
from torch import Tensor

from trainer.core import gpu
from trainer.core.format import DTYPE_WORDS

# The import costs half a second, which a run without shards need not wait for.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

COPIED_AT_ONCE = 2**28
"""Bytes that are copied from a GPU before the host waits, and so page-locked in main memory."""


class LazyTensor(Protocol):
    """A tensor that is not in memory yet, of which only what is asked for gets there."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Give rows `start:stop`, or all with `...`, on the CPU; do not write to them."""

    def identity(self) -> str:
        """Tell it from tensors of other values, as far as that can be done without reading it."""


@final
@dataclass(frozen=True, eq=False)
class InMemoryTensor:
    """A tensor that is in memory after all, as of a new head."""

    value: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.value.dtype

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Give rows, or all with `...`."""
        return self.value[rows]

    def identity(self) -> str:
        """Hash its values."""
        return hashlib.blake2b(bits_of(self.value).numpy().data, digest_size=16).hexdigest()


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is one rank's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def dtype_name(dtype: torch.dtype) -> str:
    """Write a dtype without its module: `float64`."""
    return str(dtype).removeprefix("torch.")


def dtype_word(dtype: torch.dtype) -> str:
    """Write a dtype as the field does: `fp32`."""
    return DTYPE_WORDS.get(dtype_name(dtype), str(dtype))


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Give the dtype in which the gradient of a parameter is added up and reduced."""
    return parameter.grad_dtype or parameter.dtype


def bits_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """View a dense tensor as a row of integers no wider than its elements; copied if need be."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    # One element is contiguous whatever its stride, but only stride 1 takes another dtype.
    return flat.as_strided(flat.shape, (1,)).view(dtype)


def in_main_memory(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Give tensors in order, those of a GPU copied; waits for it once for `COPIED_AT_ONCE`."""
    copies, size, from_gpu = list[Tensor](), 0, False
    for tensor in tensors:
        # A copy begins at once, and many of them are waited for together.
        copies.append(tensor.detach().to("cpu", non_blocking=True))
        size += tensor.nbytes
        from_gpu |= gpu.is_gpu(tensor.device)
        if size >= COPIED_AT_ONCE:
            yield from _arrived(copies, from_gpu=from_gpu)
            copies, size, from_gpu = [], 0, False
    yield from _arrived(copies, from_gpu=from_gpu)


def _arrived(copies: list[Tensor], *, from_gpu: bool) -> list[Tensor]:
    # A thread that only writes has the first GPU as its own: a wait there would take memory of it.
    if from_gpu:
        gpu.wait()
    return copies


class RowRange(NamedTuple):
    """The rows of a tensor in shards that this rank holds."""

    start: int
    stop: int
    replica: int  # which of the groups of ranks that hold the same this rank is in
    num_replicas: int  # how many such groups there are; more than one under HSDP


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered where it is in shards. Collective there."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def rows_of(tensor: DTensor) -> RowRange | None:
    """Compute which rows this rank holds; None where the ranks hold something else than rows."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see above

    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "the rank is not in its own mesh"
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


def fill(target: Tensor, source: LazyTensor) -> None:
    """Copy a whole tensor into another, or of it the rows that this rank holds there."""
    if not is_sharded(target) or target.to_local().shape == target.shape:
        local_part(target).copy_(source[...])
        return
    rows = rows_of(target)
    assert rows is not None, "parameters must be sharded along dimension 0"
    target.to_local().copy_(source[rows.start : rows.stop])


@contextmanager
def full_products() -> Iterator[None]:
    """Compute products of fp32 tensors in fp32, and not in TF32, inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
