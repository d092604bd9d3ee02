"""Let the global batch grow, or shrink, where so many samples, tokens or epochs are behind.

The micro-batches of a ramp may stay as they are: a larger step accumulates more of them. Merrill et
al. 2025 (2505.23971) begin small and grow, since what a batch may be grows fast at first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from trainer.config.components import Stages
from trainer.config.messages import line
from trainer.core.errors import ConfigError
from trainer.core.rows import Row, RunFacts
from trainer.plan.batch_size import BatchSize, Position


@final
@dataclass(frozen=True, kw_only=True)
class Ramp(BatchSize):
    """The size of the last stage whose beginning a step has reached.

    A step that passes the beginning of a stage is of the stage before, whole.
    """

    gives_sizes = True

    stages: Stages  # size by where it begins
    at: Literal["samples", "tokens", "epochs"] = "samples"  # what counts that

    def __post_init__(self) -> None:
        """Refuse sizes by where they begin that are no ramp."""
        begins, text = [*self.stages], None
        pairs = [*itertools.pairwise(begins)]
        if begins[0] != 0:
            text = f"the first stage has to begin at 0: {{0: {self.stages[begins[0]]}, ...}}"
        elif late := [b for a, b in pairs if b < a]:
            text = f"{late[0]} stands behind a later beginning; write stages in their order"
        elif same := [b for a, b in pairs if self.stages[a] == self.stages[b]]:
            text = f"the stage at {same[0]} has the size of that before; leave it out"
        elif self.at != "epochs" and (odd := [b for b in begins if b % 1]):
            text = f"no step begins at {odd[0]} {self.at}; of epochs: batch.at=epochs"
        if text:
            raise ConfigError(line("batch.stages", self.stages, text))

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
