"""Scale the loss of a run in fp16, whose smaller gradients would be zeros; once a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

from trainer.core.stateful import State, Stateful

# Without a gradient that is not finite, after which the scale is doubled.
GROWTH_STEPS = 2000


@final
@dataclass
class LossScale(Stateful):
    """What the loss is multiplied by, and its gradient divided by when it is reduced.

    As PyTorch's `GradScaler`, but for a whole step: every micro-batch of it has the same scale, and
    one that is not finite skips it. The same on all ranks.
    """

    # A power of two, so that scaling rounds nothing.
    value: float = 65536.0
    good_steps: int = 0  # since it was changed

    def __post_init__(self) -> None:
        """Refuse a scale that no run has."""
        if not 1 <= self.value < 2.0**127 or self.good_steps < 0:
            raise ValueError(f"loss scale of {self.value} after {self.good_steps} steps")

    def state(self) -> State:
        """See the base class."""
        return asdict(self)

    def load(self, state: State) -> None:
        """See the base class."""
        vars(self).update(vars(LossScale(**state)))

    def after_update(self, step: int) -> None:
        """Count a step whose gradient was finite."""
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = 2 * self.value, 0

    def shrink(self) -> bool:
        """Halve the scale after a gradient that was not finite; tell whether that was possible."""
        is_possible, self.good_steps = self.value > 1, 0
        self.value = max(1.0, self.value / 2)
        return is_possible
