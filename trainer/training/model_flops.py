"""Give the speed of a step in model FLOPs: those of its real tokens, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from trainer.plan.cut import IntArray


@final
@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of forward and backward of one model, and what the devices can do."""

    per_token: float
    per_pair: float = 0.0  # of tokens of one sample
    peak: float | None = None  # of all ranks' devices, per second; None where nobody knows

    def of(self, lengths: IntArray) -> float:
        """Count those of samples, `(samples,)`, of so many tokens."""
        numbers = lengths.astype(np.float64)
        return self.per_token * float(numbers.sum()) + self.per_pair * float((numbers**2).sum())

    def speed(self, lengths: IntArray, seconds: float) -> dict[str, float]:
        """Give the figures of a step over these samples that took so long."""
        each = self.of(lengths) / seconds
        return {"model_flops_per_second": each} | ({"mfu": each / self.peak} if self.peak else {})
