"""Accumulate in one pass: every micro-batch backpropagates its sums over the step's divisors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from trainer.accumulate.base import Computed, Divisors, GradientStrategy, Rows, divided
from trainer.core.micro_batch import MicroBatch
from trainer.objectives.base import Objective, sums_of
from trainer.parallel.base import Parallel


@final
@dataclass(frozen=True)
class Sum(GradientStrategy):
    """Exact for every objective that is a sum over samples, however the batch is cut.

    `grad(sum_i S_i / D) = sum_i grad(S_i / D)`, with one D for the whole global batch.
    """

    single_backward = True

    def micro_batch(
        self,
        model: Parallel,
        objective: Objective,
        micro_batch: MicroBatch,
        divisors: Divisors,
        rows: Rows,
    ) -> Computed:
        """See the base class."""
        sums = sums_of(objective, model.call, micro_batch.fields, micro_batch.weights)
        loss = divided(sums.losses, divisors)
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        return Computed(loss=loss, metrics=sums.metrics)
