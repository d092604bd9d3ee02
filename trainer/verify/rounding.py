"""Measure how far rounding alone moves a gradient, by moving every weight by its last bit.

A gradient computed twice in other groups of samples differs by rounding, and how much that is
depends on the model: it is `eps` times the size of the terms that are added up, and these may
cancel to far less than themselves, down to nothing but noise where a gradient is zero on paper (a
key's bias under softmax, a bias before a norm). No constant knows that size. Weights moved at
random by their last bit change every rounding on the way and leave the mathematics as it is, so
the same groups of samples, computed a few times so, spread as far as rounding goes (random
perturbation as in CESTAC, Vignes 1993).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

Gradient = Mapping[str, Tensor]

NUM_DRAWS = 3
"""Passes whose spread is taken. A gradient of one element, rounded to few bits, now and then gives
the same noise twice."""


@final
class Rounding:
    """Measures the rounding of a gradient, each amount of it at most once, when it is asked for.

    Args:
        module: whose weights are moved, and put back.
        gradient: computes the gradient of the same samples each time.
    """

    def __init__(self, module: nn.Module, gradient: Callable[[], Gradient]) -> None:
        self._module = module
        self._gradient = gradient
        self._found: dict[float, Mapping[str, float]] = {}

    def measure(self, amount: float) -> Mapping[str, float]:
        """Measure how far the gradient spreads, largest element by parameter.

        Args:
            amount: of every weight's move, relative: `eps` shows rounding alone; its root changes
                a gradient by a root of `eps` too, unless there is nothing in it but rounding.
        """
        if amount not in self._found:
            self._found[amount] = self._measure(amount)
        return self._found[amount]

    def _measure(self, amount: float) -> Mapping[str, float]:
        low: dict[str, Tensor] = {}
        high: dict[str, Tensor] = {}
        for seed in range(NUM_DRAWS):
            with _moved(self._module, amount, seed):
                found = {name: _as_real(g) for name, g in self._gradient().items()}
            low = {name: torch.minimum(low.get(name, g), g) for name, g in found.items()}
            high = {name: torch.maximum(high.get(name, g), g) for name, g in found.items()}
        return {name: float((high[name] - low[name]).max()) for name in high if high[name].numel()}


def _as_real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


@contextmanager
def _moved(module: nn.Module, amount: float, seed: int) -> Iterator[None]:
    """Multiply every weight by one plus or minus an amount, the sign drawn."""
    draw = torch.Generator().manual_seed(seed)
    weights = [_as_real(w.detach()) for w in module.parameters()]
    weights = [weight for weight in weights if weight.is_floating_point()]
    saved = [weight.clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                signs = torch.randint(0, 2, weight.shape, generator=draw) * 2 - 1
                weight.mul_(1 + amount * signs.to(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, saved, strict=True):
                weight.copy_(before)
