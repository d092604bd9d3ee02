"""Compare gradients, and tell an error from rounding by what rounding was measured to be.

A gradient computed twice in other groups of samples differs by rounding: by `eps` times the size of
the terms that are added up. Of most parameters these are as large as their sum. Where they cancel
(a key's bias under softmax, a bias before a norm, whose gradients are zero on paper), what is left
is rounding of terms as large as the gradients of others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Gradient = Mapping[str, Tensor]
"""A step's gradient by parameter name; what no micro-batch uses is left out."""

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error that counts as rounding, by the precision of the comparison.

Over 40 models, conv nets, GPTs and Hugging Face heads, it was at most 1e-12 in float64, and 1e-7 to
5e-5 in float32.
"""

# Differences up to this share of the largest gradient of any parameter are rounding of terms that
# cancel, some 500 `eps`; a fault of that size is hidden. In float32 they would hide much of a small
# gradient, so that there the gradient itself must be as small.
LOST = {torch.float64: 1e-13, torch.float32: 5e-5}


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

    @functools.cached_property
    def worst(self) -> list[tuple[str, float]]:
        """Parameters with their error, the largest first."""
        return sorted(self.by_name.items(), key=lambda each: -each[1])


def compared(found: Gradient, expected: Gradient, dtype: torch.dtype) -> Errors:
    """Compare gradients: max absolute difference over max absolute reference, by parameter.

    A gradient that only one side has is compared with zeros. Of a difference that rounding of terms
    that cancel explains, the largest gradient of all is the measure.
    """
    sizes = {name: _largest(gradient) for name, gradient in expected.items()}
    largest = max(filter(math.isfinite, sizes.values()), default=0.0)
    lost = LOST[dtype] * largest
    by_name, cancelled = dict[str, float](), list[str]()
    for name in sorted(found.keys() | expected.keys()):
        ours, theirs, size = found.get(name), expected.get(name), sizes.get(name, 0.0)
        if ours is not None and theirs is not None:
            wide = torch.promote_types(theirs.dtype, torch.float64)
            distance = _largest(ours.to(wide) - theirs.to(wide))
        elif ours is not None:  # what only one side has is compared with zeros
            distance = _largest(ours)
        else:
            distance = size
        by_name[name] = _ratio(distance, size)
        if by_name[name] <= EXACT[dtype]:
            continue
        bound = max(distance, size) if dtype != torch.float64 else distance
        if bound <= lost:
            by_name[name] = _ratio(distance, largest)
            cancelled.append(name)
        elif size <= lost:  # over a gradient that is rounding itself an error has no meaning
            by_name[name] = _ratio(distance, lost / EXACT[dtype])
    return Errors(by_name=by_name, limit=EXACT[dtype], cancelled=tuple(cancelled))


def is_finite(gradient: Gradient) -> bool:
    """Whether all of its numbers are finite."""
    return all(bool(values.isfinite().all()) for values in gradient.values())


def _ratio(distance: float, size: float) -> float:
    if not distance and not size:
        return 0.0
    if not size:
        return math.inf
    error = distance / size
    # Not a number would be no larger than any limit.
    return math.inf if not math.isfinite(error) else error


def _largest(values: Tensor) -> float:
    """Give the largest absolute value; not a number where there is one that is not."""
    return 0.0 if not values.numel() else float(values.abs().max())
