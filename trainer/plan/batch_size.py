"""Say how many samples, or tokens, stand behind each optimizer step.

A pure function of the step, so that a step that is replayed or resumed has the same samples.

To add one, subclass `BatchSize` and name the class in a YAML file of the group `batch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from trainer.core.rows import Described, Row, RunFacts, row


@dataclass(frozen=True, kw_only=True)
class BatchSize(Described, ABC):
    """The size of every global batch, in what `batch.unit` counts.

    Subclasses are frozen dataclasses whose further fields are the keys of their YAML file.
    """

    is_constant: ClassVar[bool] = False
    """Whether all steps have the same size; steps are then counted without walking over them."""

    global_batch: int  # `batch.global`

    @abstractmethod
    def size(self, step: int) -> int:
        """Give the samples, or tokens, behind a step, at least 1; the first step is 0."""

    @property
    def largest(self) -> int:
        """The most that any step has: what memory is planned for."""
        return self.global_batch

    def lr_factor(self, step: int) -> float:
        """Give a factor on the learning rate of a step, beside that of the schedule."""
        return 1.0

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        text = None if self.is_constant else f"a step has {self.largest:,} at most"
        return [row("", text, largest_batch=self.largest)]


@final
@dataclass(frozen=True, kw_only=True)
class ConstantSize(BatchSize):
    """As many for every step."""

    is_constant = True

    def size(self, step: int) -> int:
        """See the base class."""
        return self.global_batch
