"""Tell which part of a tensor over many samples belongs to a few of them, and compare the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.core.micro_batch import MicroBatch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference of activations that is rounding; coupling shows at 1e-3 and more."""

LOW_TOLERANCE = 1e-2


class Share(NamedTuple):
    """Where the samples of a smaller micro-batch lie within a larger one.

    Counted in samples, or under packing in tokens: the first, how many, and of how many; then the
    positions per sample of the smaller one, and of the larger one.
    """

    start: int
    size: int
    total: int
    length: int = 0
    total_length: int = 0


def shares(whole: MicroBatch, parts: Sequence[MicroBatch], *, packed: bool) -> list[Share]:
    """Place micro-batches that hold, in order, the samples of a larger one."""
    sizes = [m.num_positions if packed else len(m.ids) for m in parts]
    total, positions = sum(sizes), whole.num_positions
    return [
        Share(sum(sizes[:i]), size, total, part.num_positions // max(1, size), positions // total)
        for i, (size, part) in enumerate(zip(sizes, parts, strict=True))
    ]


def align(whole: Tensor, part: Tensor, share: Share) -> tuple[Tensor, Tensor] | None:
    """View the same samples and positions in both tensors.

    Dimensions that differ otherwise, such as time, are cut to what both have, from the front:
    padding is on the right.

    Returns:
        Two views of one shape; None where it cannot be known which part is whose.
    """
    start, size, total, length, total_length = share
    if whole.dim() != part.dim() or not whole.dim():
        return None
    for dim in range(whole.dim()):
        if (whole.shape[dim], part.shape[dim]) == (total, size):
            return _crop(whole.narrow(dim, start, size), part)
    # (samples * positions, ...): modules that work on single tokens flatten so.
    if (whole.shape[0], part.shape[0]) != (total * total_length, size * length) or not size:
        return None
    rows = whole.view(total, total_length, *whole.shape[1:])
    return _crop(rows.narrow(0, start, size), part.view(size, length, *part.shape[1:]))


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
