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
        if text := self._fault():
            raise ConfigError(line("batch.stages", self.stages, text))

    def _fault(self) -> str | None:
        begins = [*self.stages]
        if begins[0] != 0:
            return f"the first stage has to begin at 0: {{0: {self.stages[begins[0]]}, ...}}"
        for before, begin in itertools.pairwise(begins):
            if begin < before:
                return f"{begin} stands behind a later beginning; write stages in their order"
        for before, begin in itertools.pairwise(begins):
            if self.stages[before] == self.stages[begin]:
                return f"the stage at {begin} has the size of that before; leave it out"
        for begin in begins:
            if self.at != "epochs" and begin % 1:
                return f"no step begins at {begin} {self.at}; of epochs: batch.at=epochs"
        return None

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
        found = 0
        # The stages are in order, and the first begins at 0.
        for begin, size in self.stages.items():
            if begin <= behind:
                found = size
        return found

    def warnings(self, begins: Sequence[Position], end: Position) -> Sequence[str]:
        """Name the stages without a step."""
        sizes, behind = set(map(self.size, begins)), getattr(end, self.at)
        text = f"the run ends after {behind:g} {self.at}, and has no step of the stage"
        found = list[str]()
        for begin, size in self.stages.items():
            if size not in sizes or begin >= behind:
                found.append(f"batch.stages: {text} at {begin}")
        return found

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class; the stages are described with the run."""
        return ()
