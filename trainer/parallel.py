"""The mechanism behind a parallel mode: where parameters and gradients live, and how they meet.

A sync policy decides *when* gradients are reduced; this room knows *how*, and undoes every
division that a reducer would make, so that the normalizer stays the weight of the global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.micro_batch import Fields
from trainer.world import World


class Parallel(ABC):
    """A model laid out over the ranks.

    Attributes:
        module: the user's module; its parameters are the ones the optimizer steps.
        call: runs the model on the fields of a micro-batch.
    """

    module: nn.Module
    call: Callable[[Fields], Any]

    @abstractmethod
    def gather(self) -> None:
        """Bring the parameters of the window to this rank. Collective."""

    @abstractmethod
    def reduce(self) -> None:
        """Sum the gradients over all ranks; None stays where no rank used it. Collective."""

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Compute the 2-norm of the whole gradient, a 0-d tensor. Collective."""

    @abstractmethod
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a 0-d tensor."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget every gradient of a step that is to be replayed or skipped."""


@final
@dataclass(frozen=True)
class Replicated(Parallel):
    """Every rank holds the whole model; one flat all-reduce sums the gradients.

    No reducer hooks the backward, so ranks may differ in their number of micro-batches and in
    the parameters they use, and nothing is left half-finished when memory runs out.
    """

    module: nn.Module
    call: Callable[[Fields], Any]
    parameters: Sequence[nn.Parameter]
    world: World

    def gather(self) -> None:
        """Do nothing: the parameters are here."""

    def reduce(self) -> None:
        """See the base class; a flag per parameter rides along and keeps unused ones at None."""
        if self.world.size == 1:
            return
        used = torch.tensor(
            [float(p.grad is not None) for p in self.parameters], device=self.world.device
        )
        flags: list[float] = self.world.sum(used).tolist()
        live = [p for p, flag in zip(self.parameters, flags, strict=True) if flag]
        for parameter in live:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in {p.dtype for p in live}:
            grads = [p.grad for p in live if p.grad is not None and p.dtype == dtype]
            flat = self.world.sum(torch.cat([g.reshape(-1) for g in grads]))
            pieces = torch.split(flat, [g.numel() for g in grads])
            torch._foreach_copy_(
                grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)]
            )

    def gradient_norm(self) -> Tensor:
        """See the base class; accumulated in fp32 at least."""
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
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]
