"""Accumulate in one pass: every micro-batch backpropagates its sums over the step's divisors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import Divisors, GradientStrategy, divided, seed_draws
from trainer.core.micro_batch import MicroBatch, to_device
from trainer.models.check import refuse_sparse_gradients, unmoved
from trainer.objectives.base import Objective, sums_of
from trainer.parallel.base import Parallel


@final
@dataclass(frozen=True)
class Sum(GradientStrategy):
    """Exact for every objective that is a sum over samples, however the batch is cut.

    `grad(sum_i S_i / D) = sum_i grad(S_i / D)`, with one D for the whole global batch.
    """

    single_backward = True

    def backward(
        self,
        model: Parallel,
        objective: Objective,
        micro_batches: Sequence[MicroBatch],
        divisors: Sequence[Divisors],
    ) -> Tensor:
        """See the base class."""
        device = next(model.module.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        last = len(micro_batches) - 1
        for index, micro_batch in enumerate(micro_batches):
            seed_draws(micro_batch.rng_key, device)
            # In lockstep a rank with fewer micro-batches fills up with some of no samples.
            aside = nullcontext() if micro_batch.ids else unmoved(model.module)
            with model.micro_batch(is_last=index == last), aside:
                fields = to_device(micro_batch.fields, device)
                sums = sums_of(objective, model.call, fields, micro_batch.weights)
                loss = divided(sums.losses, divisors[index])
                loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
                if index == 0:
                    refuse_sparse_gradients(model.module)
            total += loss.detach()
            micro_batch.metrics.update(sums.metrics)
        return total
