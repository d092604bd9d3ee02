"""Sum gradients to the same bits however micro-batches are divided over ranks and steps.

Floating-point sums depend on their order; sums of integers do not. The exponents of fp64 are
grouped by 32 into bins. The largest bin that a micro-batch needs for an element of the gradient is
the first of its two int64 digits to base 2^32 (three for fp64), and all micro-batches are cut off
after the last digit. So every layout of the same micro-batches gives the same bits; these are the
binned sums of Ahrens, Demmel and Nguyen (2020).

It holds for all finite gradients, subnormal ones too. From each micro-batch an element loses less
than 2^-32 (fp64: 2^-64) of the largest that any of them adds to it. It costs 17 bytes of memory and
of traffic per parameter (fp64: 25).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from trainer.core.tensors import as_real, gradient_dtype
from trainer.core.world import World
from trainer.parallel.base import Parallel
from trainer.parallel.sync import Reduction

# Exponents of a bin; a digit has 31 more, so that 2^31 micro-batches can be added
BITS = 32
SMALLEST = -32  # the bin of zeros and subnormal numbers


@final
class _BinnedSum:
    """A sum of tensors of the shape, type and device of `like`, the same bits for every order."""

    def __init__(self, like: Tensor) -> None:
        count = 2 if like.itemsize <= torch.float32.itemsize else 3
        self._digits = torch.zeros((count, *like.shape), dtype=torch.int64, device=like.device)
        self._bins = torch.full(like.shape, SMALLEST, dtype=torch.int8, device=like.device)

    def clear(self) -> None:
        """Start again from zero."""
        self._digits.zero_()
        self._bins.fill_(SMALLEST)

    def add(self, values: Tensor) -> None:
        """Add finite values."""
        rest = values.double()
        # Bits 52 to 62 of fp64 are the exponent, with 1023 added.
        exponents = ((rest.view(torch.int64) >> 52) & 2047) - 1023
        self._raise(torch.maximum((exponents >> 5).to(torch.int8), self._bins))
        rest = _scaled(rest, -self._bins)
        for digit in self._digits:
            whole = rest.trunc()
            digit.add_(whole.long())
            rest = (rest - whole) * 2.0**BITS

    def reduce(self, world: World) -> None:
        """Add the sums of all ranks. Collective."""
        # Digits can be added only to the same base, that of the largest bin of all ranks.
        self._raise(world.max(self._bins.clone()))
        world.sum(self._digits)

    def value(self) -> Tensor:
        """Round the sum to fp64."""
        total = torch.zeros_like(self._digits[0], dtype=torch.float64)
        for digit in self._digits.flip(0):
            total = total * 2.0**-BITS + digit
        return _scaled(total, self._bins)

    def _raise(self, bins: Tensor) -> None:
        """Move each element's digits to the larger bin; those behind the last are dropped."""
        by = bins - self._bins
        for place in reversed(range(len(self._digits))):
            digit = torch.where(by == 0, self._digits[place], 0)
            for i in range(place):
                digit = torch.where(by == place - i, self._digits[i], digit)
            self._digits[place] = digit
        self._bins = bins


def _scaled(values: Tensor, bins: Tensor) -> Tensor:
    """Multiply by 2^(32 bins): in two steps, since fp64 does not hold all of these powers."""
    half = ((bins.long() * (BITS // 2) + 1023) << 52).view(torch.float64)
    return values * half * half


@final
@dataclass(eq=False, repr=False)
class Ordered(Parallel):
    """Every rank has the whole model, with the same weights; gradients are summed as integers."""

    is_ordered = True
    _sums: list[_BinnedSum] = field(default_factory=list, init=False)
    _wrong: Tensor = field(init=False)  # how many gradients were not finite

    def __post_init__(self) -> None:
        self._wrong = torch.zeros(1, dtype=torch.int64, device=self.world.device)

    def gather(self) -> None:
        """Set the integer sums to zero."""
        if not self._sums:
            self._sums = [_BinnedSum(as_real(p.detach())) for p in self.parameters]
        self.drop_gradients()

    def used(self) -> Sequence[bool]:
        """See the base class; a gradient from outside of micro-batches counts too."""
        self._add_gradients()
        return [index in self._live for index in range(len(self.parameters))]

    def make_room(self) -> None:
        """Do nothing: the sums are there since the step began."""

    def reduce(self, used: Sequence[bool]) -> None:
        """See the base class: this rank's integers are sent."""
        self.world.sum(self._wrong)
        # Not a branch: the device would have to be waited for.
        fault = torch.where(self._wrong > 0, float("nan"), 1.0)
        for parameter, total, flag in zip(self.parameters, self._sums, used, strict=True):
            if flag:
                total.reduce(self.world)
                parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
                as_real(parameter.grad).copy_(total.value() * fault)

    def drop_gradients(self) -> None:
        """See the base class."""
        super().drop_gradients()
        self._wrong.zero_()
        for total in self._sums:
            total.clear()

    @contextmanager
    def _computing(self, reduction: Reduction, *, is_last: bool) -> Iterator[None]:
        # Whatever the policy, the gradient joins this rank's integers.
        yield
        self._add_gradients()

    def _add_gradients(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            values = as_real(parameter.grad)
            is_finite = values.isfinite()
            self._wrong += (~is_finite).any()
            self._sums[index].add(torch.where(is_finite, values, 0.0))
            self._live.add(index)
            parameter.grad = None
