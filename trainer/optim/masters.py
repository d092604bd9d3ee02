"""Step fp32 copies of weights in half precision, whose gradients are accumulated in fp32.

A weight in bf16 has 8 bits of precision, so an update below 1/512 of it is lost in rounding, and a
sum of many gradients is percents off. So gradients of such weights may be wider than they are
(`grad_dtype`); the optimizer is then built over master copies in the dtype of the gradients, and
after each step the weights are their values, rounded to the nearest. Copies take 4 bytes each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.errors import ConfigError
from trainer.core.tensors import gradient_dtype, local_part
from trainer.models.first_weights import with_parameters

MASTERS = "master_weights"  # attribute of an optimizer that steps copies: its `MasterWeights`
HALF = (torch.bfloat16, torch.float16)


def widen_gradients(model: nn.Module) -> None:
    """Have the gradients of trained weights in half precision added up in fp32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float64:
            text = f"{name} has fp64 weights, whose gradients would lose bits; leave it out"
            raise ConfigError(f"accum.buffer=fp32: {text}")
        if parameter.requires_grad and parameter.dtype in HALF:
            parameter.grad_dtype = torch.float32


@final
class MasterWeights:
    """The copies that an optimizer steps in place of weights whose gradients are wider."""

    def __init__(self, model: nn.Module) -> None:
        # Each weight of a model with its copy, in shards where the weight is
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for weight in model.parameters():
            wide = gradient_dtype(weight)
            if weight.requires_grad and wide != weight.dtype:
                self.pairs.append((weight, nn.Parameter(weight.detach().to(wide))))
        self._versions: list[int] = []

    def in_place(self, model: nn.Module) -> AbstractContextManager[None]:
        """Have a model whose parameters are the copies, under the same names, inside the block."""
        return with_parameters(model, {id(weight): copy for weight, copy in self.pairs})

    def follow(self, optimizer: Optimizer) -> None:
        """Bring gradients to the copies ahead of each step of an optimizer, and values back."""
        if self.pairs:
            setattr(optimizer, MASTERS, self)
            optimizer.register_step_pre_hook(self._take_gradients)
            optimizer.register_step_post_hook(self.write_back)
            self._note_writes()

    @torch.no_grad()
    def _take_gradients(self, *_: Any) -> None:  # noqa: ANN401 - as hooks are called
        """Move the gradients of the weights to the copies; a weight that was written to counts."""
        for (weight, copy), version in zip(self.pairs, self._versions, strict=True):
            # A part with state may have written to it, as a clamp does.
            if local_part(weight)._version != version:
                local_part(copy).copy_(local_part(weight))
            copy.grad, weight.grad = weight.grad, None

    @torch.no_grad()
    def write_back(self, *_: Any) -> None:  # noqa: ANN401 - as hooks are called
        """Give the weights the values of their copies, rounded."""
        for weight, copy in self.pairs:
            local_part(weight).copy_(local_part(copy))
        self._note_writes()

    def _note_writes(self) -> None:
        self._versions = [local_part(weight)._version for weight, _ in self.pairs]


def masters_of(optimizer: Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """List the weights that an optimizer steps copies of, each with its copy."""
    masters: MasterWeights | None = getattr(optimizer, MASTERS, None)
    return [] if masters is None else masters.pairs
