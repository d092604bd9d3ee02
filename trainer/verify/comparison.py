"""Compare gradients, and tell an error from rounding.

A gradient computed twice in other groups of samples differs by rounding, and how much that is
depends on the model: it is `eps` times the size of the terms that are added up, and these may
cancel to far less than themselves, down to nothing but noise where a gradient is zero on paper (a
key's bias under softmax, a bias before a norm). No constant knows that size. Weights moved at
random by their last bit change every rounding on the way and leave the mathematics as it is, so
that the same step, computed a few times so, shows it (random perturbation as in CESTAC, Vignes
1993).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

Gradient = Mapping[str, Tensor]
"""A step's gradient by parameter name; what no micro-batch uses is left out."""

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error that counts as rounding, by the precision of the comparison. In float32
it depends on the model (1e-7 to 5e-5 measured) and is measured for each parameter; this bounds it.
"""

# How many times the measured rounding a difference may be. Over 40 models, conv nets, GPTs and
# Hugging Face heads, it was at most 4 times the largest of two moves.
MARGIN = 8.0
# A gradient that a move by the root of `eps` changes by more than this share is rounding only.
NOTHING = 0.25
# Share of the largest gradient that is rounding only, whatever moved weights show: the bias of a
# softmax over classes, which is zero on paper, may have the same few bits however they move.
LOST = {torch.float64: 1e-14}
# Passes with moved weights. A gradient of one element, rounded to few bits, now and then gives the
# same noise twice.
NUM_DRAWS = 3


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far a gradient is from its reference, by parameter."""

    # Max absolute difference relative to `sizes`; infinite where it is not finite
    by_name: Mapping[str, float]
    limits: Mapping[str, float]  # largest that is rounding
    # Max absolute reference; that of the terms that cancel, where all is rounding
    sizes: Mapping[str, float]
    cancelled: tuple[str, ...] = ()  # parameters whose error is relative to the terms that cancel

    @property
    def largest(self) -> float:
        """Over all parameters."""
        return max(self.by_name.values(), default=0.0)

    @property
    def limit(self) -> float:
        """That of the worst parameter."""
        return self.limits[self.worst[0][0]] if self.by_name else 0.0

    @property
    def is_exact(self) -> bool:
        """Whether all of it is rounding."""
        return all(error <= self.limits[name] for name, error in self.by_name.items())

    @functools.cached_property
    def worst(self) -> list[tuple[str, float]]:
        """Parameters with their error: those beyond their limit first, the largest first."""
        return sorted(self.by_name.items(), key=lambda e: (e[1] <= self.limits[e[0]], -e[1]))


def compared(
    found: Gradient,
    expected: Gradient,
    dtype: torch.dtype,
    rounding: Callable[[float], Mapping[str, float]],
) -> Errors:
    """Compare gradients: max absolute difference over max absolute reference, by parameter.

    A gradient that only one side has is compared with zeros. What rounding leaves of terms that
    cancel is compared with those terms instead, whose size is the measured rounding over `eps`, and
    no more than the largest gradient; this cannot hide more than the limit times that one.
    `rounding` measures, by parameter, how far the gradient goes for a relative move of the weights;
    it is called where it matters, for several times the cost of one gradient.
    """
    rounding, eps = functools.cache(rounding), torch.finfo(dtype).eps
    sizes = {name: _largest(gradient) for name, gradient in expected.items()}
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    least = EXACT[dtype] * largest

    def limit(name: str, size: float) -> float:
        if dtype == torch.float64 or not size:
            return EXACT[dtype]
        noise = max(rounding(eps).get(name, 0.0), eps * size)
        return min(EXACT[dtype], MARGIN * noise / size)

    def cancelling(name: str, distance: float, size: float) -> float:
        """Size the terms that cancel, where nothing but rounding is left; else 0."""
        lost = max(distance, size) <= LOST.get(dtype, 0.0) * largest
        if not min(distance, size) <= least:  # not a number, maybe
            return 0.0
        noise = rounding(eps).get(name, 0.0)
        if lost or distance <= min(MARGIN * noise, least):
            return largest if lost else min(noise / eps, largest)
        # A move by the root of `eps` changes a gradient by a root of `eps` too, unless there is
        # nothing in it but rounding.
        changed = rounding(math.sqrt(eps)).get(name, 0.0) if size <= least else 0.0
        return min(max(noise, changed, size) / eps, largest) if changed > NOTHING * size else 0.0

    by_name, limits, cancelled = dict[str, float](), dict[str, float](), list[str]()
    for name in sorted(found.keys() | expected.keys()):
        distance, size = _distance(found.get(name), expected.get(name)), sizes.get(name, 0.0)
        error, limits[name] = _ratio(distance, size), limit(name, size)
        if error > limits[name] and (terms := cancelling(name, distance, size)):
            error, limits[name] = _ratio(distance, terms), limit(name, terms)
            sizes[name] = terms
            cancelled.append(name)
        by_name[name] = error
    return Errors(by_name=by_name, limits=limits, sizes=sizes, cancelled=tuple(cancelled))


def measure_rounding(
    module: nn.Module, gradient: Callable[[], Gradient], amount: float
) -> dict[str, float]:
    """Measure how far a gradient goes when every weight moves by a relative amount and back.

    The sign of each move is drawn anew `NUM_DRAWS` times. Gives distances of the largest element.
    """
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}
    weights = [_as_real(weight.detach()) for weight in module.parameters()]
    weights = [weight for weight in weights if weight.is_floating_point()]
    before = [weight.clone() for weight in weights]
    for seed in range(NUM_DRAWS):
        draw = torch.Generator().manual_seed(seed)
        try:
            for weight in weights:
                signs = torch.randint(0, 2, weight.shape, generator=draw) * 2 - 1
                weight.mul_(1 + amount * signs.to(weight))
            found = {name: _as_real(values) for name, values in gradient().items()}
        finally:
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        low = {name: torch.minimum(low.get(name, g), g) for name, g in found.items()}
        high = {name: torch.maximum(high.get(name, g), g) for name, g in found.items()}
    return {name: float((high[name] - low[name]).max()) for name in high if high[name].numel()}


def _as_real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


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
