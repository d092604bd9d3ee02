"""Try a sync policy: does it leave the sum over micro-batches and ranks, whatever their counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.core.format import plural
from trainer.core.tensors import is_sharded
from trainer.core.world import World
from trainer.parallel.base import Parallel
from trainer.parallel.sync import SyncPolicy

COUNTS = (1, 2, 3, 8)  # micro-batches of one step; steps follow each other
LIMIT = 1e-10  # of the gradient, in float64
SHAPES = ((6, 4), (3,))


class _Linear(nn.Module):
    """Has the gradient that its input says."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.weights = nn.ParameterList(map(zeros, SHAPES))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([scale * weight.sum() for weight in self.weights]).sum()


@final
@dataclass(frozen=True, slots=True)
class WrongSum:
    """What a policy leaves in place of a sum."""

    error: float  # relative to the sum
    count: int  # micro-batches of the step
    text: str  # what is wrong, and what to do


def find_wrong_sum(
    policy: SyncPolicy, lay_out: Callable[[nn.Module, Any], Parallel], world: World
) -> WrongSum | None:
    """Take a few steps of two small tensors whose gradient is known; 0.1 s. Collective.

    Without lockstep every other rank has one micro-batch more.

    Args:
        policy: reduces them; a copy of it does.
        lay_out: lays a module, and a call of it, out over the ranks as the run does.
        world: the ranks of the run.
    """
    policy, module = copy.deepcopy(policy), _Linear(world.device)
    model = lay_out(module, lambda fields: module(**fields))
    for count in COUNTS:
        error = _error(policy, model, world, count)
        if not error <= LIMIT:
            over = f"{plural(count, 'micro-batch')} and {plural(world.size, 'rank')}"
            text = (
                f"{type(policy).__name__} leaves a gradient that is not the sum over {over} "
                f"(relative error {error:.1g})"
            )
            return WrongSum(error, count, text)
    return None


def _error(policy: SyncPolicy, model: Parallel, world: World, count: int) -> float:
    """Take a step, and compare its gradient with the sum, the largest error of all ranks."""
    counts = [count + (rank % 2 and not policy.lockstep) for rank in range(world.size)]
    scales = [[10.0 * rank + i + 1 for i in range(n)] for rank, n in enumerate(counts)]
    expected, own = sum(map(sum, scales)), torch.tensor(scales[world.rank], dtype=torch.float64)
    model.begin(policy)
    for index, scale in enumerate(own.to(world.device)):
        with model.micro_batch(is_last=index == len(own) - 1):
            model.call({"scale": scale}).backward()
    model.used()
    model.make_room()
    model.reduce([True] * len(model.parameters))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters]
    local = [grad.to_local() if is_sharded(grad) else grad for grad in grads]
    distances = torch.stack([(grad - expected).abs().sum() for grad in local])
    model.drop_gradients()
    return float(world.max(distances.nan_to_num(nan=torch.inf).max())) / expected
