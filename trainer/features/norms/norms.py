"""Measure the weights, gradients and updates of each block of a model, every so many steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.assemble.features import Feature
from trainer.checkpoint.state import plain_name
from trainer.config.run_config import RunConfig
from trainer.core.stateful import NORMS_OF_PARAMETERS, State, Stateful, StepGradient
from trainer.core.tensors import local_part
from trainer.models.recompute import blocks_of
from trainer.optim.masters import masters_of
from trainer.parallel.base import Parallel, sum_of_squares
from trainer.training.context import StepContext


@final
@dataclass(frozen=True)
class NormsOfParameters(Feature):
    """Measures them every so many steps; never where that is None."""

    every: int | None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        return cls(config.log.parameters)

    def parts(self, context: StepContext) -> Sequence[Stateful]:
        """See the base class."""
        if self.every is None:
            return ()
        return [ParameterNorms(context.parallel, context.optimizer, self.every)]


@final
class ParameterNorms(Stateful):
    """2-norms over whole tensors, however they are laid out, by name: `weight_norm/blocks.0`.

    Blocks are those of the model's `nn.ModuleList`; all else goes by the modules beside it. The
    gradient is that before clipping, the weight that before the update. Where an optimizer steps
    master copies, those are measured. In a step that is measured, what is trained is copied once.
    """

    def __init__(self, model: Parallel, optimizer: Optimizer, every: int) -> None:
        self._model, self._every = model, every
        self._gradients: list[Tensor] = []  # squares, of the step that is measured
        self._before: list[list[Tensor]] = []  # what it updates
        self._found: Mapping[str, Tensor] = {}
        copies = {id(weight): copy for weight, copy in masters_of(optimizer)}
        of_blocks = set(map(id, blocks_of(model.module)))
        named = model.module.named_modules()
        blocks = [plain_name(name) for name, part in named if id(part) in of_blocks]
        self._weights = defaultdict[str, list[tuple[nn.Parameter, nn.Parameter]]](list)
        for name, weight in model.module.named_parameters():
            if weight.requires_grad:
                block = block_of(plain_name(name), blocks)
                self._weights[block].append((weight, copies.get(id(weight), weight)))

    @torch.no_grad()
    def see_gradient(self, gradient: StepGradient) -> None:
        """See the base class."""
        if gradient.step % self._every:
            return
        self._gradients, self._before = [], []
        for pairs in self._weights.values():
            grads = [local_part(weight.grad) for weight, _ in pairs if weight.grad is not None]
            self._gradients += self._squares([grads])
            self._before.append([local_part(stepped).clone() for _, stepped in pairs])

    def _squares(self, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [sum_of_squares(each, self._model.world.device) for each in groups]

    def after_update(self, step: int) -> None:
        """See the base class; one reduction over shards. Collective."""
        if step % self._every:
            return
        weights = self._squares(self._before)
        for pairs, copies in zip(self._weights.values(), self._before, strict=True):
            torch._foreach_sub_(copies, [local_part(stepped) for _, stepped in pairs])
        updates, self._before = self._squares(self._before), []
        each = torch.stack([*weights, *self._gradients, *updates])
        names = [f"{kind}{block}" for kind in NORMS_OF_PARAMETERS for block in self._weights]
        squares = self._model.sum_over_shards(each)
        self._found = dict(zip(names, squares.sqrt().unbind(), strict=True))

    def metrics(self) -> Mapping[str, Tensor]:
        """Give them once: a step that is skipped has none."""
        found, self._found = self._found, {}
        return found

    def state(self) -> State:
        """Nothing: it is in no checkpoint."""
        return {}

    def load(self, state: State) -> None:
        """See `state`."""


def block_of(name: str, blocks: Sequence[str]) -> str:
    """Name what a parameter is counted with: its block, or the module beside the blocks."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return block
    owners = {block.rpartition(".")[0].rpartition(".")[0] for block in blocks}
    within = [f"{owner}." for owner in owners if owner and name.startswith(f"{owner}.")]
    prefix = max(within, key=len, default="")
    return prefix + name.removeprefix(prefix).partition(".")[0]
