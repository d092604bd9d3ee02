"""Compare a planned step's gradient with that of the same samples grouped beyond doubt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.normalizer import Kind
from trainer.training.batches import PlannedBatch
from trainer.verify.copies import Gradient, Groups, Scratch
from trainer.verify.rounding import Rounding

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error that counts as rounding, by the precision of the comparison. In float64
it is the limit. Rounding in float32 depends on the model (1e-7 to 5e-5 measured), so that there
the limit of each parameter is what is measured for it, and this only bounds it."""

MARGIN = 8.0
"""How many times the measured rounding a difference may be. Over 40 models, conv nets,
GPTs and Hugging Face heads, it was at most 4 times the largest of two moves."""

NOTHING = 0.25
"""A gradient that a move by the root of `eps` changes by more than this share of itself holds
rounding only."""


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far a gradient is from its reference.

    Attributes:
        by_name: per parameter, max absolute difference over max absolute reference; infinite
            where either is not finite. Over the size of the terms that cancel, where all of the
            difference or all of the reference is rounding.
        limits: largest that is rounding, by parameter.
        sizes: what the difference is relative to, by parameter.
        cancelled: parameters whose error is relative to the terms that cancel.
    """

    by_name: Mapping[str, float]
    limits: Mapping[str, float]
    sizes: Mapping[str, float]
    cancelled: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """Over all parameters."""
        return max(self.by_name.values(), default=0.0)

    @property
    def limit(self) -> float:
        """That of the worst parameter."""
        return self.limits[self.worst[0][0]] if self.by_name else 0.0

    @property
    def is_exact(self) -> bool:
        """Whether all of it is rounding."""
        return all(error <= self.limits[name] for name, error in self.by_name.items())

    @cached_property
    def worst(self) -> list[tuple[str, float]]:
        """Parameters with their error: those beyond their limit first, the largest first."""
        return sorted(self.by_name.items(), key=lambda e: (e[1] <= self.limits[e[0]], -e[1]))


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

    def one_piece(self) -> Gradient:
        """Compute the step in one piece, in the order of the plan, as the run itself would."""
        whole = self.groups.group(self.groups.positions)
        return self.scratch.gradient([whole], self.scratch.kit.normalizer)

    def errors(self, planned: Gradient, expected: Gradient) -> Errors:
        """Compare two gradients by the precision of this case, and by its rounding."""
        dtype = self.scratch.dtype or torch.float32
        return compared(planned, expected, dtype, Rounding(self.scratch.module, self.planned))


def compared(found: Gradient, expected: Gradient, dtype: torch.dtype, rounding: Rounding) -> Errors:
    """Compare gradients: max absolute difference over max absolute reference, by parameter.

    A gradient that only one side has is compared with zeros. What rounding leaves of terms that
    cancel is compared with those terms instead, whose size is the measured rounding over `eps`,
    and no more than the largest gradient: where a gradient is zero on paper, and where it is so
    much smaller than its terms that rounding alone exceeds the limit. Neither can hide what is
    larger than the limit times the largest gradient.

    Args:
        found: one gradient.
        expected: the reference.
        dtype: float64, or float32, where the limit is what rounding is measured to be.
        rounding: of the same gradient; measured only where it matters.
    """
    sizes = {name: _largest(gradient) for name, gradient in expected.items()}
    scale = _Scale(
        dtype, max((s for s in sizes.values() if math.isfinite(s)), default=0.0), rounding
    )
    by_name, limits, cancelled = dict[str, float](), dict[str, float](), list[str]()
    for name in sorted(found.keys() | expected.keys()):
        distance, size = _distance(name, found, expected), sizes.get(name, 0.0)
        error, limits[name] = _ratio(distance, size), scale.limit(name, size)
        if error > limits[name] and (terms := scale.cancelling(name, distance, size)):
            error, limits[name] = _ratio(distance, terms), scale.limit(name, terms)
            sizes[name] = terms
            cancelled.append(name)
        by_name[name] = error
    return Errors(by_name=by_name, limits=limits, sizes=sizes, cancelled=tuple(cancelled))


@final
@dataclass(frozen=True)
class _Scale:
    """What a difference is compared with.

    Attributes:
        dtype: of the comparison.
        largest: reference over all parameters.
        rounding: of the gradient.
    """

    dtype: torch.dtype
    largest: float
    rounding: Rounding

    def limit(self, name: str, size: float) -> float:
        """Give the largest error of a parameter that is rounding, relative to `size`."""
        if self.dtype == torch.float64 or not size:
            return EXACT[self.dtype]
        eps = torch.finfo(self.dtype).eps
        noise = max(self.rounding.measure(eps).get(name, 0.0), eps * size)
        return min(EXACT[self.dtype], MARGIN * noise / size)

    def cancelling(self, name: str, distance: float, size: float) -> float:
        """Give the size of the terms that cancel, where nothing but rounding is left; else 0."""
        eps, least = torch.finfo(self.dtype).eps, EXACT[self.dtype] * self.largest
        if not min(distance, size) <= least:  # not a number, maybe
            return 0.0
        noise = self.rounding.measure(eps).get(name, 0.0)
        if distance <= min(MARGIN * noise, least):
            return min(noise / eps, self.largest)
        changed = self.rounding.measure(math.sqrt(eps)).get(name, 0.0)
        if size <= least and changed > NOTHING * size:
            return min(max(noise, changed, size) / eps, self.largest)
        return 0.0


def _distance(name: str, found: Gradient, expected: Gradient) -> float:
    if name in expected and name in found:
        wide = torch.promote_types(expected[name].dtype, torch.float64)
        return _largest(found[name].to(wide) - expected[name].to(wide))
    return _largest(found[name] if name in found else expected[name])


def _ratio(distance: float, size: float) -> float:
    error = distance / size if size else math.inf if distance else 0.0
    return error if math.isfinite(error) else math.inf


def _largest(values: Tensor) -> float:
    """Give the largest absolute value; not a number where there is one that is not."""
    return float(values.abs().max()) if values.numel() else 0.0
