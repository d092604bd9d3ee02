"""Which part of a tensor over many samples belongs to a few of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor

from trainer.core.micro_batch import MicroBatch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference of activations that is rounding; coupling shows at 1e-3 and more."""

LOW_TOLERANCE = 1e-2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Where the samples of a smaller micro-batch lie within a larger one.

    Counted in samples, or under packing in tokens.

    Attributes:
        start: of the first.
        size: how many.
        total: of the larger one.
        length: positions per sample of the smaller one.
        total_length: positions per sample of the larger one.
    """

    start: int
    size: int
    total: int
    length: int
    total_length: int


def shares(whole: MicroBatch, parts: Sequence[MicroBatch], *, packed: bool) -> list[Share]:
    """Place micro-batches that hold, in order, the samples of a larger one."""
    sizes = [m.num_positions if packed else len(m.ids) for m in parts]
    total = whole.num_positions if packed else len(whole.ids)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        Share(
            start=start,
            size=size,
            total=total,
            length=part.num_positions // size if size else 0,
            total_length=whole.num_positions // total,
        )
        for start, size, part in zip(starts, sizes, parts, strict=True)
    ]


def align(whole: Tensor, part: Tensor, share: Share) -> tuple[Tensor, Tensor] | None:
    """View the same samples and positions in both tensors.

    Dimensions that differ otherwise, such as time, are cut to what both have, from the front:
    padding is on the right.

    Returns:
        Two views of one shape; None where it cannot be told which part is whose.
    """
    if whole.dim() != part.dim() or not whole.dim():
        return None
    for dim in range(whole.dim()):
        if (whole.shape[dim], part.shape[dim]) == (share.total, share.size):
            return _crop(whole.narrow(dim, share.start, share.size), part)
    # (samples * positions, ...): modules that work on single tokens flatten so.
    flat = (share.total * share.total_length, share.size * share.length)
    if (whole.shape[0], part.shape[0]) != flat or share.size == 0:
        return None
    rows = whole.view(share.total, share.total_length, *whole.shape[1:])
    mine = part.view(share.size, share.length, *part.shape[1:])
    return _crop(rows.narrow(0, share.start, share.size), mine)


def _crop(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    for dim in range(first.dim()):
        size = min(first.shape[dim], second.shape[dim])
        first, second = first.narrow(dim, 0, size), second.narrow(dim, 0, size)
    return first, second


def close(first: Tensor, second: Tensor, relevant: Tensor | None = None) -> bool:
    """Tell whether two tensors of one shape differ by no more than rounding.

    Args:
        first: of any dtype; only floating-point numbers may be rounded.
        second: what the difference is relative to, by its largest value.
        relevant: which elements count; None is all.
    """
    if relevant is not None:
        first, second = first[relevant], second[relevant]
    if not second.is_floating_point() or first.dtype != second.dtype:
        return bool((first == second).all())
    finite = second[torch.isfinite(second)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    limit = TOLERANCE.get(second.dtype, LOW_TOLERANCE) * scale
    return torch.allclose(first, second, rtol=0.0, atol=limit, equal_nan=True)


def tensors_of(value: Any, path: str = "") -> dict[str, Tensor]:  # noqa: ANN401 - module arguments
    """List the tensors that a module takes or gives, by where they stand."""
    if isinstance(value, Tensor):
        return {path: value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, Tensor] = {}
    for name, item in value.items():
        found |= tensors_of(item, f"{path}.{name}")
    return found
