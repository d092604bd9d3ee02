"""Define objectives whose loss is a function of what the model gives for all samples of a step.

The loss is `F(r_1, ..., r_B)`, where the rows `r_i` depend on sample `i` alone. `two_pass` computes
its exact gradient for every cut: rows first, then `F` and its gradient by row, and then the rows
again with a graph. An evaluation brings the rows of all that is held out together likewise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer.core.coupling import Coupling
from trainer.core.micro_batch import Fields
from trainer.objectives.base import ModelCall, Objective, Sums


class CoupledObjective(Objective):
    """An objective over all samples of a step, by a few numbers of each.

    What is one for a whole micro-batch, such as a learnt temperature or a sum, is a row as well:
    `value.expand(samples)`, of which `sums_of_rows` takes the mean, counts its gradient once.
    """

    coupling = Coupling("batch", why="its loss is over all samples of a step")

    gives_rows = True
    min_samples: int = 1
    """Samples without which a step has no loss."""

    @abstractmethod
    def rows(self, model: ModelCall, fields: Fields) -> Mapping[str, Tensor]:
        """Run the model on one micro-batch.

        Returns:
            Named tensors with one row for each sample, `(samples, ...)`. They are exchanged between
            ranks: let them be small.
        """

    @abstractmethod
    def sums_of_rows(self, rows: Mapping[str, Tensor]) -> Sums:
        """Sum over all samples of a step, or of an evaluation, dividing by nothing.

        Args:
            rows: of all of them, in sample order; the same on every rank.
        """

    def row_predictions(self, rows: Mapping[str, Tensor]) -> Sequence[tuple[Any, Any]]:
        """Give label and prediction of each sample by its rows; see `predictions`."""
        return ()

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Take one micro-batch for all there is."""
        return self.sums_of_rows(self.rows(model, fields))
