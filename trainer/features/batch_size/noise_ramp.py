"""Let the global batch grow with the gradient noise scale that a run measures.

What a batch may be grows while a run learns (McCandlish et al. 2018, 1812.06162, section 2.3;
Merrill et al. 2025, 2505.23971), and where it ends up is not known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, final

from trainer.config.components import Count
from trainer.config.messages import line
from trainer.core.errors import ConfigError
from trainer.core.format import number
from trainer.core.rows import Row, RunFacts, row
from trainer.core.stateful import State, StepGradient
from trainer.features.batch_size.noise_scale import LEAST_MEASUREMENTS, NoiseScale
from trainer.plan.batch_size import BatchSize, Position


@dataclass(frozen=True, kw_only=True)
class NoiseSize(BatchSize):
    """A size that follows the noise scale, which is measured whatever `log.noise_scale` says."""

    unit: Literal["samples", "tokens"] = "samples"  # `batch.unit`

    @cached_property
    def noise(self) -> NoiseScale:
        """What was measured up to now, a part of the state."""
        return NoiseScale(self.unit)

    def see_gradient(self, gradient: StepGradient) -> None:
        """See `Stateful`."""
        self.noise.see_gradient(gradient)


@final
@dataclass(frozen=True, kw_only=True)
class NoiseRamp(NoiseSize):
    """A multiple of `batch.global` that the noise scale is above, by two standard errors.

    It begins with `batch.global`, never shrinks, and at most doubles in a decision.
    """

    max: Count  # a multiple of `batch.global`
    every: Count = 50  # steps between decisions

    # The steps behind which a size begins to count, each with that size, `batch.global` first
    _decisions: list[list[int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Refuse a largest batch that is no multiple of the first."""
        self._decisions.append([0, super().largest])
        if self.max % super().largest:
            text = f"must be a multiple of batch.global={super().largest}"
            raise ConfigError(line("batch.max", self.max, text))

    @property
    def largest(self) -> int:
        """See the base class."""
        return self.max

    def size(self, at: Position) -> int:
        """See the base class."""
        found = self._decisions[0][1]
        for step, size in self._decisions:
            if step <= at.step:
                found = size
        return found

    def after_update(self, step: int) -> None:
        """Decide on the size of the steps that follow; waits for the device then."""
        (_, first), (_, size) = self._decisions[0], self._decisions[-1]
        if step % self.every or size == self.max:
            return
        noise = self.noise.estimate()
        carried = int(noise.low) // first * first
        larger = min(carried, 2 * size, self.max)
        if larger > size and noise.measurements >= LEAST_MEASUREMENTS:
            self._decisions.append([step, larger])

    def state(self) -> State:
        """See `Stateful`."""
        return {"decisions": self._decisions, "noise": self.noise.state()}

    def load(self, state: State) -> None:
        """See `Stateful`."""
        (_, begun), (_, grown) = state["decisions"][0], state["decisions"][-1]
        if begun != super().largest:
            raise ConfigError(f"batch.global={super().largest}: type {begun}, as the run began")
        if grown > self.max:
            text = f"the batch of the run has grown to {grown} already; type as much or more"
            raise ConfigError(f"batch.max={self.max}: {text}")
        self._decisions[:] = [[int(step), int(size)] for step, size in state["decisions"]]
        self.noise.load(state["noise"])

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        text = f"grows with the noise scale, asked every {number(self.every)} steps"
        return [row("", text, largest_batch=self.max)]
