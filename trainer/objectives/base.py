"""What an objective is: named loss sums over named, data-only weights. It never divides.

The step's loss is `sum_k S_k / D_k`: `S_k` the sum of term `k` over the whole global batch, `D_k`
its denominator, also over the whole global batch and all ranks, known before the first backward.
A coefficient belongs into the sum. Metrics are sums over weights in the same way, so evaluation
is exact for every split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import Tensor

from trainer.micro_batch import Fields

ModelCall = Callable[[Fields], Any]
"""Calls the model with those fields its `forward` names; gives what the model gives."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What one micro-batch adds to the step.

    Attributes:
        losses: named 0-d sums with a graph.
        metrics: named 0-d sums without one.
    """

    losses: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """Turns a model and a micro-batch into named sums, and a micro-batch into named weights."""

    scope: Literal["sample", "embedding"] = "sample"
    """`sample`: a sum over samples. `embedding`: samples are coupled (contrastive)."""

    @abstractmethod
    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count what each loss and metric is divided by, from the data alone.

        Returns:
            A weight for every name that `sums` gives.
        """

    @abstractmethod
    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Run the model on one micro-batch and sum, dividing by nothing."""


def logits_of(output: Any) -> Tensor:  # noqa: ANN401 - models return what they like
    """Take the logits out of a model's output: the output itself or its `.logits`."""
    return output if isinstance(output, Tensor) else output.logits
