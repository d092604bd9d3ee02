"""What one rank stores of a run's tensors: all of one, some rows of it, or nothing.

A tensor in shards (FSDP2) is stored by the ranks that hold it, each its own rows; where several
groups of ranks hold the same (HSDP), the tensors are dealt among the groups. What every rank
holds whole is stored by the first. Nothing here sends anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from trainer.checkpoint.dtensors import is_sharded, local, rows_of


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What this rank stores of a tensor. Names of the same tensor share one object.

    Attributes:
        shape: of the whole tensor.
        dtype: its own.
        rows: of dimension 0, or the whole tensor; None where other ranks store it.
        start: the first of the rows.
    """

    shape: torch.Size
    dtype: torch.dtype
    rows: Tensor | None
    start: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.rows is not None and self.rows.shape == self.shape


def pieces(tensors: Mapping[str, Tensor | Piece], rank: int = 0) -> dict[str, Piece]:
    """Tell what a rank stores of each tensor; the answers of all ranks fit together.

    Args:
        tensors: by name, the same names on every rank; pieces are passed on.
        rank: this one.

    Raises:
        TypeError: something is no tensor.
    """
    found: dict[str, Piece] = {n: t for n, t in tensors.items() if isinstance(t, Piece)}
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Piece)}
    aliases = find_aliases(plain)
    dealt: dict[int, int] = defaultdict(int)
    for name, tensor in plain.items():
        found[name] = found[aliases[name]] if name in aliases else _piece(tensor, rank, dealt)
    return {name: found[name] for name in tensors}


def aliases_of(parts: Mapping[str, Piece]) -> dict[str, str]:
    """Find the further names of pieces, each with the first name."""
    first: dict[int, str] = {}
    kept = {name: first.setdefault(id(piece), name) for name, piece in parts.items()}
    return {name: origin for name, origin in kept.items() if name != origin}


def num_bytes(parts: Mapping[str, Piece]) -> int:
    """Add up what this rank stores, names of the same tensor counted once."""
    once = {id(piece): piece.rows for piece in parts.values()}
    return sum(rows.numel() * rows.element_size() for rows in once.values() if rows is not None)


def snapshot(parts: Mapping[str, Piece]) -> dict[str, Piece]:
    """Copy what this rank stores to the CPU, out of reach of later steps; ties stay."""
    copies = {id(piece): _copied(piece) for piece in parts.values()}
    return {name: copies[id(piece)] for name, piece in parts.items()}


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the names that show the very same memory as an earlier one.

    Returns:
        For every further name the first one. Tensors that overlap in part are not aliases.

    Raises:
        TypeError: something is no tensor.
    """
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {type(tensor).__qualname__} is no tensor")
        kept = first.setdefault(_memory(tensor), name)
        if kept != name:
            aliases[name] = kept
    return aliases


def _memory(tensor: Tensor) -> tuple[object, ...]:
    # A rank may hold no row of either of two tied tensors, and must still know that they are.
    if is_sharded(tensor) or tensor.numel() == 0 or tensor.layout != torch.strided:
        return (id(tensor),)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _piece(tensor: Tensor, rank: int, dealt: dict[int, int]) -> Piece:
    nothing = Piece(tensor.shape, tensor.dtype, None)
    if not is_sharded(tensor):
        return replace(nothing, rows=tensor.detach()) if rank == 0 else nothing
    place = rows_of(tensor)
    assert place is not None, "captured tensors are in rows, or whole"
    # Equal loads are told apart by number: every rank deals alike.
    chosen = min(range(place.replicas), key=lambda replica: (dealt[replica], replica))
    dealt[chosen] += tensor.nbytes
    mine = replace(nothing, rows=local(tensor), start=place.start)
    if mine.is_whole:
        return mine if rank == 0 else nothing
    is_mine = chosen == place.replica and place.start < place.stop
    return mine if is_mine else nothing


def _copied(piece: Piece) -> Piece:
    if piece.rows is None:
        return piece
    copy = piece.rows.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(piece, rows=copy)
