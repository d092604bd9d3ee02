"""Measure the weights, gradients and updates of each block of a model, every so many steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.state import plain_name
from trainer.core.stateful import NORMS_OF_PARAMETERS
from trainer.core.tensors import local_part
from trainer.models.recompute import blocks_of
from trainer.optim.masters import masters_of
from trainer.parallel.base import Parallel, sum_of_squares

Norms = Mapping[str, Tensor]
"""2-norms by name, 0-d: `weight_norm/blocks.0`."""


@final
class ParameterNorms:
    """2-norms over whole tensors, however they are laid out.

    Blocks are those of the model's `nn.ModuleList`; all else goes by the modules beside it. The
    gradient is that before clipping, the weight that before the update. Where an optimizer steps
    master copies, those are measured. In a step that is measured, what is trained is copied once.
    """

    def __init__(self, model: Parallel, optimizer: Optimizer, every: int) -> None:
        self._model, self._every = model, every
        copies = {id(weight): copy for weight, copy in masters_of(optimizer)}
        of_blocks = {id(block) for block in blocks_of(model.module)}
        named = model.module.named_modules()
        blocks = [plain_name(name) for name, part in named if id(part) in of_blocks]
        self._weights = defaultdict[str, list[tuple[nn.Parameter, nn.Parameter]]](list)
        for name, weight in model.module.named_parameters():
            if weight.requires_grad:
                block = block_of(plain_name(name), blocks)
                self._weights[block].append((weight, copies.get(id(weight), weight)))

    @torch.no_grad()
    def begin(self, step: int) -> Callable[[], Norms]:
        """Look before an update; what is returned is called after it. Both on all ranks."""
        if step % self._every:
            return dict
        grads = [[w.grad for w, _ in pairs if w.grad is not None] for pairs in self._groups]
        squares = self._squares([[*map(local_part, each)] for each in grads])
        before = [[local_part(stepped).clone() for _, stepped in pairs] for pairs in self._groups]
        return lambda: self._end(before, squares)

    @property
    def _groups(self) -> Sequence[Sequence[tuple[nn.Parameter, nn.Parameter]]]:
        return [*self._weights.values()]

    def _squares(self, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [sum_of_squares(each, self._model.world.device) for each in groups]

    @torch.no_grad()
    def _end(self, before: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor]) -> Norms:
        """Compute norms; one reduction over shards. Collective."""
        weights = self._squares(before)
        for pairs, copies in zip(self._groups, before, strict=True):
            torch._foreach_sub_(list(copies), [local_part(stepped) for _, stepped in pairs])
        updates = self._squares(before)
        squares = self._model.sum_over_shards(torch.stack([*weights, *gradients, *updates]))
        names = [f"{kind}{block}" for kind in NORMS_OF_PARAMETERS for block in self._weights]
        return dict(zip(names, squares.sqrt().unbind(), strict=True))


def block_of(name: str, blocks: Sequence[str]) -> str:
    """Name what a parameter is counted with: its block, or the module beside the blocks."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return block
    owners = {block.rpartition(".")[0].rpartition(".")[0] for block in blocks}
    within = [f"{owner}." for owner in owners if owner and name.startswith(f"{owner}.")]
    prefix = max(within, key=len, default="")
    return prefix + name.removeprefix(prefix).partition(".")[0]
