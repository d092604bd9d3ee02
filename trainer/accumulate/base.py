"""Define gradient strategies: each owns the loop over the micro-batches of one step.

It leaves this rank's share of the step's gradient in `.grad`. It never divides by a count of its
own, runs no collective of its own making, and does not catch allocation failures: agreeing over
ranks, reducing, replaying and skipping are the step's, in one place.

To add one, subclass `GradientStrategy` and name the class in a YAML file of `accum/gradient`.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from trainer.core.coupling import Kind
from trainer.core.micro_batch import MicroBatch
from trainer.core.rows import Described
from trainer.data import samples
from trainer.objectives.base import Objective, at_least_single
from trainer.parallel.base import Parallel

Divisors = Mapping[str, float]
"""What each named loss sum of one micro-batch is divided by."""


class GradientStrategy(Described, ABC):
    """How the gradients of micro-batches become the step's gradient."""

    couplings: ClassVar[frozenset[Kind]] = frozenset({"none", "group", "micro_batch"})
    """The couplings of an objective that it is exact for."""

    single_backward: ClassVar[bool] = False
    """Whether a micro-batch has one backward, so that the last may send gradients as it goes on."""

    @abstractmethod
    def backward(
        self,
        model: Parallel,
        objective: Objective,
        micro_batches: Sequence[MicroBatch],
        divisors: Sequence[Divisors],
    ) -> Tensor:
        """Accumulate the gradient of `sum_k S_k / D_k` over this rank's micro-batches.

        For every micro-batch, within `model.micro_batch`: run the objective, divide its sums and
        call `backward()` on them. A step that leaves no parameter a gradient is refused.

        May be called again on the same micro-batches: every random draw is keyed to its
        micro-batch, so a replay gives the same bits.

        Args:
            model: the model, laid out over ranks.
            objective: gives the named sums.
            micro_batches: this rank's, in order; may be walked more than once.
            divisors: one per micro-batch, of the whole global batch over all ranks.

        Returns:
            This rank's share of the step's loss, detached, a 0-d tensor.
        """


def seed_draws(key: int, device: torch.device) -> None:
    """Tie every random draw that follows to a key: of PyTorch, NumPy and Python (10 us)."""
    samples.seed_draws(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def divided(losses: Mapping[str, Tensor], divisors: Divisors) -> Tensor:
    """Turn the named sums of one micro-batch into its share of the step's loss, 0-d.

    A term without a single weight in the global batch has a sum of zero and adds zero. Sums in half
    precision are widened, where a quotient by small divisors may not fit.
    """
    return sum_of([at_least_single(s) / (divisors[name] or 1.0) for name, s in losses.items()])


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Add 0-d tensors, in order."""
    return functools.reduce(operator.add, terms)
