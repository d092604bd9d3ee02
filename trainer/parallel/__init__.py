"""The mechanism behind a parallel mode: where parameters and gradients live, and how they meet.

A sync policy decides *when* gradients are reduced; this room knows *how*, and undoes every
division that a reducer would make, so that the normalizer stays the weight of the global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.micro_batch import Fields
from trainer.world import World

BUCKET_BYTES = 16 * 2**20
"""Small gradients are packed into buckets of this size; larger ones are reduced where they lie."""


class Parallel(ABC):
    """A model laid out over the ranks.

    Attributes:
        module: the user's module; its parameters are the ones the optimizer steps.
        call: runs the model on the fields of a micro-batch.
        parameters: those that are trained, in an order that is the same on every rank.
        world: all ranks.
    """

    module: nn.Module
    call: Callable[[Fields], Any]
    parameters: Sequence[nn.Parameter]
    world: World

    @abstractmethod
    def gather(self) -> None:
        """Bring the parameters of the window to this rank. Collective."""

    @abstractmethod
    def release(self) -> None:
        """Let go of what `gather` brought, when no gradient is to be reduced."""

    @abstractmethod
    def used(self) -> Sequence[bool]:
        """Tell which parameters have a gradient from this rank's micro-batches."""

    @abstractmethod
    def reduce(self, used: Sequence[bool]) -> None:
        """Sum the gradients over all ranks, and end the window. Collective.

        Args:
            used: which parameters have a gradient on any rank; that of the others stays None.
        """

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Compute the 2-norm of the whole gradient, a 0-d tensor. Collective."""

    @abstractmethod
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget every gradient of a step that is to be replayed or skipped."""

    @abstractmethod
    def begin_lockstep(self) -> None:
        """Begin a step without a window, in which every micro-batch is collective. Collective."""

    @abstractmethod
    def reducing(self, *, across: bool, is_last: bool) -> AbstractContextManager[None]:
        """Wrap a forward and backward that reduces its own gradient. Collective.

        Args:
            across: whether over all ranks, or only within the groups that share one copy.
            is_last: whether it is the step's last.
        """

    @abstractmethod
    def end_lockstep(self, used: Sequence[bool]) -> None:
        """End a step without a window.

        Args:
            used: which parameters have a gradient on any rank; that of the others becomes None.
        """


@final
class Replicated(Parallel):
    """Every rank holds the whole model; all-reduces of its gradients end the window.

    No reducer hooks the backward, so ranks may differ in their number of micro-batches and in
    the parameters they use, and nothing is left half-finished when memory runs out.

    Args:
        module: the user's module, the same weights on every rank.
        call: runs it.
        parameters: those that are trained.
        world: all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Fields], Any],
        parameters: Sequence[nn.Parameter],
        world: World,
    ) -> None:
        self.module = module
        self.call = call
        self.parameters = parameters
        self.world = world
        self._staging: dict[torch.dtype, Tensor] = {}
        self._live: set[int] = set()

    def gather(self) -> None:
        """Set memory aside for the reduction, so that it cannot run out once ranks have agreed."""
        if self.world.size > 1:
            for bucket in _buckets(self.parameters):
                self._stage(bucket)

    def release(self) -> None:
        """Do nothing: the parameters stay here."""

    def used(self) -> Sequence[bool]:
        """See the base class."""
        if self._live:
            return [index in self._live for index in range(len(self.parameters))]
        return [p.grad is not None for p in self.parameters]

    def reduce(self, used: Sequence[bool]) -> None:
        """See the base class."""
        if self.world.size == 1:
            return
        live = [p for p, flag in zip(self.parameters, used, strict=True) if flag]
        for parameter in live:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(live):
            grads = [p.grad for p in bucket if p.grad is not None]
            if len(grads) == 1 and grads[0].is_contiguous():
                self.world.sum(grads[0])
                continue
            flat = self._stage(bucket)
            pieces = torch.split(flat, [g.numel() for g in grads])
            views = [piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True)]
            torch._foreach_copy_(views, grads)
            self.world.sum(flat)
            torch._foreach_copy_(grads, views)

    def begin_lockstep(self) -> None:
        """See the base class."""
        self._live.clear()
        self.gather()

    @contextmanager
    def reducing(self, *, across: bool, is_last: bool) -> Iterator[None]:
        """See the base class; what is reduced already waits aside, a second gradient in memory."""
        reduced = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        yield
        self._live |= {i for i, p in enumerate(self.parameters) if p.grad is not None}
        self.reduce([True] * len(self.parameters))
        for parameter, before in zip(self.parameters, reduced, strict=True):
            if before is not None and parameter.grad is not None:
                parameter.grad += before

    def end_lockstep(self, used: Sequence[bool]) -> None:
        """See the base class."""
        for parameter, flag in zip(self.parameters, used, strict=True):
            if not flag:
                parameter.grad = None
        self._live.clear()

    def gradient_norm(self) -> Tensor:
        """See the base class; in the gradients' precision."""
        grads = self._gradients()
        if not grads:
            return torch.zeros((), device=self.world.device)
        return nn.utils.get_total_norm(grads)

    def scale_gradients(self, factor: Tensor) -> None:
        """See the base class."""
        grads = self._gradients()
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    def drop_gradients(self) -> None:
        """See the base class."""
        self._live.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _stage(self, bucket: Sequence[nn.Parameter]) -> Tensor:
        """Give memory for the gradients of a bucket, the same for every bucket of a dtype."""
        size, dtype = sum(p.numel() for p in bucket), bucket[0].dtype
        held = self._staging.get(dtype)
        if held is None or held.numel() < size:
            held = self._staging[dtype] = torch.empty(size, dtype=dtype, device=self.world.device)
        return held[:size]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group parameters of one dtype into buckets, in order; the same on every rank.

    Yields:
        Parameters whose gradients are reduced together.
    """
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        bucket: list[nn.Parameter] = []
        room = BUCKET_BYTES
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            if bucket and parameter.nbytes > room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            bucket.append(parameter)
            room -= parameter.nbytes
        yield bucket
