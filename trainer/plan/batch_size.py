"""Say how many samples, or tokens, stand behind each optimizer step.

A pure function of the position in the data, which checkpoints hold, so that a step that is replayed
or resumed has the same samples.

To add one, subclass `BatchSize` and name the class in a YAML file of the group `batch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from trainer.core.rows import Described, Row, RunFacts, row


@final
@dataclass(frozen=True, slots=True)
class Position:
    """Where a step begins."""

    step: int  # steps before it
    samples: int  # that they took; what `tail=drop` leaves out is not among them
    tokens: int  # in those, where the sizes declare `reads_tokens`, else 0
    epochs: float  # passes over the data: 1.5 is the middle of the second


@dataclass(frozen=True, kw_only=True)
class BatchSize(Described, ABC):
    """The size of every global batch, in what `batch.unit` counts.

    Subclasses are frozen dataclasses whose further fields are the keys of their YAML file.
    """

    is_constant: ClassVar[bool] = False
    """Whether all steps have the same size; steps are then counted without walking over them."""
    reads_tokens: ClassVar[bool] = False
    """Whether sizes follow the tokens before a step, which are then counted: 10 ns a sample."""

    gives_sizes: ClassVar[bool] = False
    """Whether sizes stand in arguments of its own, so that `batch.global` is null."""

    global_batch: int = 0  # `batch.global`; 0 where the class gives the sizes

    @abstractmethod
    def size(self, at: Position) -> int:
        """Give the samples, or tokens, behind the step that begins at a position, at least 1."""

    @property
    def largest(self) -> int:
        """The most that any step has: what memory is planned for."""
        return self.global_batch

    def lr_factor(self, at: Position) -> float:
        """Give a factor on the learning rate of that step, beside that of the schedule."""
        return 1.0

    def warnings(self, begins: Sequence[Position], end: Position) -> Sequence[str]:
        """Say what is odd about a run whose size changes at `begins`, and which ends at `end`."""
        return ()

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        return [row(largest_batch=self.largest)]


@final
@dataclass(frozen=True, kw_only=True)
class ConstantSize(BatchSize):
    """As many for every step."""

    is_constant = True

    def size(self, at: Position) -> int:
        """See the base class."""
        return self.global_batch
