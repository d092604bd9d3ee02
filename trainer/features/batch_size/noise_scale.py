"""Estimate the gradient noise scale: the batch beyond which more samples a step hardly pay.

A step's gradient is the true one plus noise whose squared norm falls with the samples behind it,

    E |g|^2 = |G|^2 + S / B,      noise scale = S / |G|^2

(McCandlish et al. 2018, 1812.06162). Micro-batches are smaller batches of the same step. One of
samples drawn at random, a share f of them that has a share e of the step's weight, adds a to the
gradient, with `E |a|^2 = e^2 |G|^2 + f S / B`. So over k of them, with `h = sum e^2 / f`,

    S / B = (sum |a|^2 / f - h |g|^2) / (k - h)

is unbiased for any sizes, whether they are all of the step or not. Where weights differ within a
micro-batch, it is off by about one sample of the noise scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal, final

import torch
from pydantic import Field
from torch import Tensor

from trainer.core.stateful import SavedFields, State, Stateful, StepGradient
from trainer.parallel.base import sum_of_squares
from trainer.training.batches import PlannedBatch
from trainer.training.context import EachDivisors, Measured, StepContext

MEASURED = ("random.count", "random.weight", "random.squares")
"""Of `k`, `h` and `sum |a|^2 / f`, the names in a step's sums."""

# An average reaches over the last quarter of what it is of.
RECENT = 4
# Below which nothing is concluded.
LEAST_MEASUREMENTS = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """The noise scale on the host, in what `batch.global` counts, with its uncertainty."""

    scale: float  # infinite where the true gradient cannot be told from noise
    low: float  # two standard errors below
    high: float  # two standard errors above; may be infinite
    measurements: int  # behind it

    @property
    def is_precise(self) -> bool:
        """Whether it is known within a factor of two."""
        return self.measurements >= LEAST_MEASUREMENTS and self.high <= 2 * self.low


@final
class NoiseScale(Stateful):
    """The gradient noise scale in what `batch.global` counts, smoothed over the steps of a run.

    S and |g|^2 are smoothed each on its own and then divided, since a mean of ratios is biased. The
    first is of the steps that measure it, the second of all. Both follow a run that changes: an
    average is over about the last quarter of its values.
    """

    def __init__(self, unit: Literal["samples", "tokens"]) -> None:
        self._unit = unit
        # Of |g|^2 and of S.
        self._square, self._noise = _RecentMean(), _RecentMean()
        self._inverse_size = 0.0  # mean of 1 / B
        self._is_new = False  # whether the last step measured S

    def see_gradient(self, gradient: StepGradient) -> None:
        """See the base class; nothing here waits for a device."""
        size = gradient.num_samples if self._unit == "samples" else gradient.num_tokens
        square = gradient.norm.double().square()
        self._square.add(square)
        self._inverse_size += _rate(self._square.count) * (1 / size - self._inverse_size)
        self._is_new = MEASURED[0] in gradient.measured
        if self._is_new:
            count, weight, squares = (gradient.measured[name] for name in MEASURED)
            of_step = (squares - weight * square) / (count - weight)
            self._noise.add(size * of_step)

    def metrics(self) -> dict[str, Tensor]:
        """See the base class: infinite where the true gradient cannot be told from noise yet."""
        if not self._is_new:
            return {}
        self._is_new = False
        signal = self._square.mean - self._noise.mean * self._inverse_size
        scale = self._noise.mean.clamp(min=0.0) / signal
        return {"noise_scale": torch.where(signal > 0, scale, float("inf"))}

    def estimate(self) -> NoiseEstimate:
        """Give the noise scale with its uncertainty; waits for the device.

        The standard errors of S and of |G|^2 are taken for independent (Fieller 1954).
        """
        count, (noise, noise_error) = self._noise.count, self._noise.with_error()
        square, square_error = self._square.with_error()
        signal = square - noise * self._inverse_size
        signal_error = math.hypot(square_error, noise_error * self._inverse_size)
        found = _interval(noise, noise_error, signal, signal_error)
        return NoiseEstimate(measurements=count, **found)

    def state(self) -> State:
        """See the base class."""
        means = {"square": self._square.state(), "noise": self._noise.state()}
        return {"inverse_size": self._inverse_size, **means}

    def load(self, state: State) -> None:
        """See the base class."""
        self._inverse_size = float(state["inverse_size"])
        self._square.load(state["square"])
        self._noise.load(state["noise"])


@final
class _RecentMean(SavedFields):
    """A mean over about the last quarter of the values so far, and how far they lie apart."""

    count: int = 0
    mean: Tensor = Field(default_factory=partial(torch.zeros, (), dtype=torch.float64))
    variance: Tensor = Field(default_factory=partial(torch.zeros, (), dtype=torch.float64))

    def add(self, value: Tensor) -> None:
        """Add a value, on its device; nothing here waits for it."""
        self.count += 1
        rate, mean = _rate(self.count), self.mean.to(value.device)
        change = value - mean
        self.mean = mean + rate * change
        self.variance = (1 - rate) * (self.variance.to(value.device) + rate * change.square())

    def with_error(self) -> tuple[float, float]:
        """Give the mean and its standard error, which is infinite below two values.

        The i-th of n values has a weight of nearly 4 i^3 / n^4, whose squares add up to 16 / 7n.
        """
        if self.count <= 1:
            return float(self.mean), math.inf
        # Exact for one value, and a few percent off for few.
        squares = 16 / (7 * self.count + 9)
        return float(self.mean), math.sqrt(float(self.variance) * squares / (1 - squares))


def _interval(
    noise: float, noise_error: float, signal: float, signal_error: float
) -> dict[str, float]:
    """Divide S by |G|^2, of which each has a standard error; give also two errors off."""
    scale = noise / signal if signal > 0 else math.inf
    # Nobody knows how small it is.
    if not signal > 2 * signal_error:
        least, most = max(0.0, noise - 2 * noise_error), max(signal, 0.0) + 2 * signal_error
        low = least / most if 0 < most < math.inf else 0.0
        return {"scale": max(scale, 0.0), "low": low, "high": math.inf}
    # The ends are the roots of the quadratic equation of Fieller in the ratio.
    rest = 1 - (2 * signal_error / signal) ** 2
    apart = 2 * math.sqrt(rest * noise_error**2 + (scale * signal_error) ** 2) / signal
    low, high = ((scale + sign * apart) / rest for sign in (-1, 1))
    return {"scale": max(scale, 0.0), "low": max(low, 0.0), "high": max(high, 0.0)}


def _rate(count: int) -> float:
    """Weigh the newest of so many values."""
    return RECENT / (count + RECENT - 1)


@contextmanager
def summing_norms(
    context: StepContext, batch: PlannedBatch, divisors: EachDivisors, measured: Measured
) -> Iterator[None]:
    """Sum up what this rank's random micro-batches add to the gradient, by the names of `MEASURED`.

    Gradients are seen as a backward gives them, before they are added up or reduced: the same in
    every layout and under every sync policy, and no copy of them is made. Each micro-batch has one
    backward. Its weight is its share of the step's; of several losses it is the mean of the shares.
    """
    if not batch.plan.random_slots:
        yield
        return
    model, device = context.parallel, context.world.device
    count, weight, total = 0, 0.0, torch.zeros((), dtype=torch.float64, device=device)
    squares = [torch.zeros_like(total) for _ in range(batch.plan.random_slots)]

    def see(gradient: Tensor) -> None:
        # The random micro-batches are at the front of each rank.
        if model.num_begun <= len(squares):
            squares[model.num_begun - 1] += sum_of_squares([gradient], device)

    handles = [each.register_hook(see) for each in model.computed_with]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    scale = 1.0 if context.loss_scale is None else context.loss_scale.value
    for square, each, own in zip(squares, batch.micro_batches, divisors, strict=False):
        if each.ids:
            share = part = len(each.ids) / batch.plan.num_samples
            if context.model.normalizer != "samples":
                parts = list[float]()
                for name in context.losses:
                    # A term that nothing in the step weighs has no share.
                    if own[name]:
                        parts.append(each.weights[name] / own[name])
                part = fmean(parts) if parts else 0.0
            total += square / (scale**2 * share)
            weight, count = weight + part**2 / share, count + 1
    measured |= zip(MEASURED, (count, weight, total), strict=True)
