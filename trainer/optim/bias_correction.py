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

from trainer.config.messages import show
from trainer.core.errors import ConfigError


def change_betas(optimizer: Optimizer, group: dict[str, Any], betas: Sequence[float]) -> None:
    """Give a group other betas, and count its steps as PyTorch's optimizers do, under `step`.

    `ConfigError` where no one count of steps gives all means their divisors.
    """
    before, group["betas"] = group["betas"], betas
    for counts in (group, *(optimizer.state.get(p, {}) for p in group["params"])):
        if "step" in counts and [*before] != [*betas]:
            counts["step"] = counts["step"] * step_factor(counts["step"], before, betas)


def step_factor(step: Any, before: Sequence[float], after: Sequence[float]) -> float:  # noqa: ANN401 - a number
    """Give what a count of steps is multiplied by; `ConfigError` as above."""
    # The factor f of a mean has `a ** steps == b ** (steps * f)`, so f = log a / log b.
    pairs = [*zip(before, after, strict=True)]
    factors = list[float]()
    for a, b in pairs:
        if 0.0 < a < 1.0 and 0.0 < b < 1.0:
            factors.append(math.log(a) / math.log(b))
    if all(math.isclose(each, factors[0], rel_tol=1e-6) for each in factors):
        # One power serves all, and no count is read from the device.
        return next(iter(factors), 1.0)
    steps = float(step)
    for factor in factors:
        divisors = [(1 - a**steps, 1 - b ** (steps * factor)) for a, b in pairs]
        if all(math.isclose(old, new, rel_tol=1e-6) for old, new in divisors):
            return factor
    text = f"after {steps:g} steps with {show(before)} no bias correction is right for both"
    remedy = f"type optimizer.betas={show(before)}"
    raise ConfigError(f"optimizer.betas={show(after)}: {text}; {remedy}")
