"""Count a model's floating-point operations by the lengths of samples, and know what GPUs can do.

Model FLOPs are those of one forward and backward over the real tokens: no padding, and nothing
that is computed again. A fake run counts them. Matrix products and convolutions count, two a
multiply-add; attention counts whole, causal or not, as in Chowdhery et al. 2022 (2204.02311),
appendix B. For a transformer that is `6 * P * tokens + 12 * layers * width * sum(length^2)`, with P
the parameters of its matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.config.cards import reported_as
from trainer.models.recompute import recompute_nothing
from trainer.plan.cut import IntArray
from trainer.plan.memory import Shape
from trainer.tune.forward import Counter
from trainer.tune.predict import CannotRunFake, fake_micro_batch
from trainer.tune.workload import Workload

PAIR = 2  # samples of a fake run; statistics over samples need two


@final
@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward over one sample, a polynomial of its length."""

    coefficients: tuple[float, ...]  # of the powers of the length, from the constant on
    peak: float | None = None  # what all ranks' devices can do in a second; None where nobody knows

    def of(self, lengths: IntArray) -> float:
        """Count those of samples, `(samples,)`, of so many tokens."""
        numbers = lengths.astype(np.float64)
        return sum(c * float((numbers**power).sum()) for power, c in enumerate(self.coefficients))

    def speed(self, lengths: IntArray, seconds: float) -> dict[str, float]:
        """Give the figures of a step over these samples that took so long."""
        each = self.of(lengths) / seconds
        return {"model_flops_per_second": each} | ({"mfu": each / self.peak} if self.peak else {})


def model_flops(
    work: Workload, shortest: int, longest: int, peak: float | None = None
) -> ModelFlops | None:
    """Count a model's FLOPs on fakes of up to three lengths; None where it needs values.

    Kernels that PyTorch has no formula for count as nothing. Takes 0.1 s for a small transformer, 1
    to 2 s for one of 124M parameters, and a third of it where all samples are of one length.

    The fields of `work` are padded, not packed; `peak` is what all devices can do in a second.
    """
    lengths = sorted({longest, -(-longest // 2), -(-longest // 4)})
    lengths = [longest] if shortest == longest else lengths
    try:
        counts = [_count(replace(work, fake_ranks=None), length) for length in lengths]
    except CannotRunFake:
        return None
    # As many lengths as coefficients: the parabola through them is exact.
    powers = np.vander(np.array(lengths, dtype=np.float64), increasing=True)
    return ModelFlops(tuple(np.linalg.solve(powers, np.array(counts)).tolist()), peak)


def _count(work: Workload, length: int) -> float:
    """Count one sample's FLOPs. The plain attention kernel is what has a formula everywhere."""
    counter = Counter()
    with fake_micro_batch(work, Shape(PAIR, length)) as (theirs, fields, _):
        recompute_nothing(theirs.model)
        with sdpa_kernel(SDPBackend.MATH), counter:
            theirs.backward(fields)
    return (counter.products + counter.pairs) / PAIR


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Give what a device can do in a second, dense; None where nobody knows, as for any CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return peak_of(name, precision)


def peak_of(name: str, precision: str) -> float | None:
    """Look a device up by the name that its driver reports."""
    card = reported_as(name)
    return None if card is None else card.peak(precision)
