"""Keep bias corrections right where the betas of an optimizer change.

Adam and its kin divide a running mean, which began at zero, by `1 - beta ** step`. Where beta was
another in some steps, the divisor is one minus the product of the betas of all steps. So a count of
steps becomes the one after which the new betas have that product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

STEP = "step"
"""Where PyTorch's optimizers count the steps of a parameter, in its state."""

_TOLERANCE = 1e-6  # of a divisor, relative


def follow_betas(optimizer: Optimizer, group: dict[str, Any], betas: Sequence[float]) -> None:
    """Give a group betas that are those of before, each raised to the same power.

    All counts of steps change by one factor, so nothing is read from a device.
    """
    before, group["betas"] = group["betas"], betas
    factor = next(iter(_factors(before, betas)), 1.0)
    for counts in (group, *(optimizer.state.get(p, {}) for p in group["params"])):
        if STEP in counts and factor != 1.0:
            counts[STEP] = counts[STEP] * factor


def step_factor(step: float, before: Sequence[float], after: Sequence[float]) -> float | None:
    """Give what a count of steps is multiplied by where betas change in any way.

    None where no one count gives all means their divisors: each mean would need its own.
    """
    pairs = [*zip(before, after, strict=True)]
    for factor in [*_factors(before, after), 1.0]:
        errors = [abs(new ** (step * factor) - old**step) for old, new in pairs]
        if all(e <= _TOLERANCE * (1 - old**step) for e, old in zip(errors, before, strict=True)):
            return factor
    return None


def _factors(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Give for each beta the factor that keeps its own product; one at zero needs none."""
    pairs = [*zip(before, after, strict=True)]
    return [
        1.0 if old == new else math.log(old) / math.log(new)
        for old, new in pairs
        if 0.0 < old < 1.0 and 0.0 < new < 1.0
    ]
