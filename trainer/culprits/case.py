"""One comparison: a planned step's gradient against the same samples grouped beyond doubt."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.normalizer import Kind
from trainer.culprits.scratch import Gradient, Groups, Scratch
from trainer.feed import PlannedBatch

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error that is rounding, by the precision of the comparison."""

FLOOR = 1e-2
"""Gradients below this share of the largest one are compared against that share: a gradient that
is zero on paper (a key's bias under softmax) holds rounding noise only, of 1e-15 to 1e-13 of the
largest. A fault is far above either way."""


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far a gradient is from its reference.

    Attributes:
        by_name: per parameter, max absolute difference over max absolute reference; infinite
            where either is not finite.
        limit: largest that is rounding.
    """

    by_name: dict[str, float]
    limit: float

    @property
    def largest(self) -> float:
        """Over all parameters."""
        return max(self.by_name.values(), default=0.0)

    @property
    def is_exact(self) -> bool:
        """Whether all of it is rounding."""
        return self.largest <= self.limit

    @property
    def worst(self) -> list[tuple[str, float]]:
        """Parameters with their error, the largest first."""
        return sorted(self.by_name.items(), key=lambda item: -item[1])


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A planned step, and the same samples in groups that are beyond doubt.

    Attributes:
        scratch: a copy of the run's model.
        batch: the planned step.
        groups: loads its samples anew.
        size: samples per group of the reference.
    """

    scratch: Scratch
    batch: PlannedBatch
    groups: Groups
    size: int

    @property
    def reference(self) -> str:
        """What the planned step is compared with, in words."""
        if self.size >= len(self.groups.positions):
            return "whole batch"
        return "sample by sample, summed" if self.size == 1 else f"groups of {self.size}, summed"

    def planned(
        self, kind: Kind | None = None, strategy: GradientStrategy | None = None
    ) -> Gradient:
        """Compute the planned step's gradient, with one thing changed where it is given."""
        kit = self.scratch.kit
        kit = replace(kit, strategy=strategy or kit.strategy)
        scratch = replace(self.scratch, kit=kit)
        return scratch.gradient(self.batch.micro_batches, kind or kit.normalizer)

    def expected(self) -> Gradient:
        """Compute the reference."""
        # A mean of means has no reference of its own; what it approximates is the mean.
        kind: Kind = "samples" if self.scratch.kit.normalizer == "samples" else "tokens"
        return self.scratch.gradient(self.groups.groups(self.size), kind)

    def errors(self, planned: Gradient, expected: Gradient) -> Errors:
        """Compare two gradients by the precision of this case."""
        dtype = self.scratch.dtype or torch.float32
        by_name = relative_errors(planned, expected, floor=FLOOR)
        return Errors(by_name=by_name, limit=EXACT[dtype])


def relative_errors(found: Gradient, expected: Gradient, *, floor: float) -> dict[str, float]:
    """Compare gradients: max absolute difference over max absolute reference, by parameter.

    A gradient that only one side has is compared with zeros.

    Args:
        found: one gradient.
        expected: the reference.
        floor: least reference, as a share of the largest over all parameters.
    """
    sizes = {name: _largest(gradient) for name, gradient in expected.items()}
    scale = floor * max(sizes.values(), default=0.0)
    errors = {}
    for name in sorted(found.keys() | expected.keys()):
        if name not in expected or name not in found:
            distance = _largest(found[name] if name in found else expected[name])
        else:
            distance = _largest(found[name].double() - expected[name].double())
        size = max(sizes.get(name, 0.0), scale)
        error = distance / size if size else math.inf if distance else 0.0
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def _largest(values: Tensor) -> float:
    """Give the largest absolute value; not a number where there is one that is not."""
    return float(values.abs().max()) if values.numel() else 0.0
