"""Compare gradients, and tell an error from rounding.

A gradient computed twice in other groups of samples differs by rounding: `eps` times the size of
the terms that are added up. These may cancel to far less than themselves, down to nothing but noise
where a gradient is zero on paper (a key's bias under softmax, a bias before a norm). What is left
of them is compared with the largest gradient instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Gradient = Mapping[str, Tensor]
"""A step's gradient by parameter name; what no micro-batch uses is left out."""

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error that counts as rounding, by the precision of the comparison. In float32
it depends on the model: 1e-7 to 5e-5 were measured."""

NOISE = {torch.float64: 1e-13, torch.float32: 1e-5}
"""Share of the largest gradient up to which a gradient, or a difference, is that of terms that
cancel."""


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far a gradient is from its reference, by parameter."""

    # Max absolute difference over max absolute reference; infinite where it is not finite
    by_name: Mapping[str, float]
    limit: float  # largest that is rounding
    cancelled: tuple[str, ...] = ()  # parameters whose error is relative to the largest gradient

    @property
    def largest(self) -> float:
        """Over all parameters."""
        return max(self.by_name.values(), default=0.0)

    @property
    def is_exact(self) -> bool:
        """Whether all of it is rounding."""
        return self.largest <= self.limit

    @property
    def worst(self) -> list[tuple[str, float]]:
        """Parameters with their error, the largest first."""
        return sorted(self.by_name.items(), key=lambda e: -e[1])


def compared(found: Gradient, expected: Gradient, dtype: torch.dtype) -> Errors:
    """Compare gradients: max absolute difference over max absolute reference, by parameter.

    A gradient that only one side has is compared with zeros. Where more than rounding differs, and
    the difference or the reference is `NOISE`, it is compared with the largest gradient.

    Args:
        found: the gradient in question.
        expected: the reference.
        dtype: both were computed in.
    """
    sizes = {name: _largest(gradient) for name, gradient in expected.items()}
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    by_name, cancelled = dict[str, float](), list[str]()
    for name in sorted(found.keys() | expected.keys()):
        distance, size = _distance(found.get(name), expected.get(name)), sizes.get(name, 0.0)
        error = _ratio(distance, size)
        if error > EXACT[dtype] and min(distance, size) <= NOISE[dtype] * largest:
            error = _ratio(distance, largest)
            cancelled.append(name)
        by_name[name] = error
    return Errors(by_name=by_name, limit=EXACT[dtype], cancelled=tuple(cancelled))


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    """Give the largest absolute difference; what only one side has is compared with zeros."""
    if found is None or expected is None:
        return max(_largest(each) for each in (found, expected) if each is not None)
    wide = torch.promote_types(expected.dtype, torch.float64)
    return _largest(found.to(wide) - expected.to(wide))


def _ratio(distance: float, size: float) -> float:
    error = distance / size if size else math.inf if distance else 0.0
    return error if math.isfinite(error) else math.inf


def _largest(values: Tensor) -> float:
    """Give the largest absolute value; not a number where there is one that is not."""
    return float(values.abs().max()) if values.numel() else 0.0
