"""Let the global batch grow, or shrink, where so many samples, tokens or epochs are behind.

The micro-batches of a ramp may stay as they are: a larger step accumulates more of them. Merrill et
al. 2025 (2505.23971) begin small and grow, since what a batch may be grows fast at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from trainer.config.components import Stages
from trainer.config.rules import stages_fault
from trainer.core.rows import Row, RunFacts
from trainer.plan.batch_size import BatchSize, Position


@final
@dataclass(frozen=True, kw_only=True)
class Ramp(BatchSize):
    """The size of the last stage whose beginning a step has reached.

    A step that passes the beginning of a stage is of the stage before, whole.
    """

    gives_sizes = True
    settings_fault = staticmethod(stages_fault)

    stages: Stages  # size by where it begins
    at: Literal["samples", "tokens", "epochs"] = "samples"  # what counts that

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override] # by the settings, not the class
        """See the base class."""
        return self.at == "tokens"

    @property
    def largest(self) -> int:
        """See the base class."""
        return max(self.stages.values())

    def size(self, at: Position) -> int:
        """See the base class."""
        behind = getattr(at, self.at)
        return [size for begins, size in self.stages.items() if begins <= behind][-1]

    def warnings(self, begins: Sequence[Position], end: Position) -> Sequence[str]:
        """Name the stages without a step."""
        sizes, behind = {self.size(at) for at in begins}, getattr(end, self.at)
        unused = [b for b, size in self.stages.items() if size not in sizes or b >= behind]
        text = f"the run ends after {behind:g} {self.at}, and has no step of the stage"
        return [f"batch.stages: {text} at {begin}" for begin in unused]

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class; the stages are described with the run."""
        return ()
