"""Gradients whose bits do not depend on how micro-batches are spread over ranks and steps.

Floating-point sums depend on their order; sums of integers do not. Each micro-batch's gradient is
rounded to a multiple of 2^-44 and added up as int64, within a rank and over ranks, so every layout
of the same micro-batches gives the same bits. It costs 8 bytes of memory per parameter, twice the
traffic of fp32, and rounds at 3e-14, below the last place of fp32 gradients larger than 5e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.micro_batch import Fields
from trainer.parallel import Parallel, Replicated
from trainer.world import World

SCALE = 2.0**44
"""Units per 1.0."""

LARGEST = 2.0**62
"""What the sum over a step may reach, in units; beyond it the step counts as not finite."""


@final
class Ordered(Parallel):
    """Every rank holds the whole model; gradients are summed as integers.

    Args:
        module: the user's module, the same weights on every rank.
        call: runs it.
        parameters: those that are trained.
        world: all ranks.
        most: micro-batches of a step at most, over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Fields], Any],
        parameters: Sequence[nn.Parameter],
        world: World,
        *,
        most: int,
    ) -> None:
        self.module = module
        self.call = call
        self.parameters = parameters
        self.world = world
        self._bound = LARGEST / most
        self._plain = Replicated(module, call, parameters, world)
        self._sums: list[Tensor] = []
        self._wrong = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._live: set[int] = set()

    def gather(self) -> None:
        """Set the integer sums to zero."""
        if not self._sums:
            self._sums = [torch.zeros_like(p, dtype=torch.int64) for p in self.parameters]
        self.drop_gradients()

    def release(self) -> None:
        """Do nothing: the parameters stay here."""

    def used(self) -> Sequence[bool]:
        """See the base class."""
        return [index in self._live for index in range(len(self.parameters))]

    def make_room(self) -> None:
        """Do nothing: the sums are there since the step began."""

    def reduce(self, used: Sequence[bool]) -> None:
        """See the base class."""
        self.world.sum(self._wrong)
        # Not a branch: the device would have to be waited for.
        fault = torch.where(self._wrong > 0, float("nan"), 1.0)
        for parameter, total, flag in zip(self.parameters, self._sums, used, strict=True):
            if flag:
                self.world.sum(total)
                parameter.grad = (total.double() * fault / SCALE).to(parameter.dtype)

    def gradient_norm(self) -> Tensor:
        """See the base class."""
        return self._plain.gradient_norm()

    def scale_gradients(self, factor: Tensor) -> None:
        """See the base class."""
        self._plain.scale_gradients(factor)

    def drop_gradients(self) -> None:
        """See the base class."""
        self._plain.drop_gradients()
        self._live.clear()
        self._wrong.zero_()
        for total in self._sums:
            total.zero_()

    def begin_lockstep(self) -> None:
        """See the base class."""
        self.gather()

    @contextmanager
    def folding(self) -> Iterator[None]:
        """Wrap a forward and backward whose gradient becomes part of the integer sums.

        Yields:
            Nothing.
        """
        yield
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            units = parameter.grad.double() * SCALE
            fits = units.abs() <= self._bound  # false for NaN
            self._wrong += (~fits).any()
            self._sums[index] += torch.where(fits, units, 0.0).round().to(torch.int64)
            self._live.add(index)
            parameter.grad = None

    def reducing(self, *, across: bool, is_last: bool) -> AbstractContextManager[None]:
        """See the base class; the integers meet at the end of the step all the same."""
        return self.folding()

    def stand_in(self) -> None:
        """Do nothing: no micro-batch holds a collective."""

    def end_lockstep(self, used: Sequence[bool]) -> None:
        """See the base class."""
        self.reduce(used)
