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
LIMIT = 1e-10  # of the largest gradient, in float64
SHAPES = {"first": (6, 4), "second": (3,)}


class _Linear(nn.Module):
    """Has the gradient that its inputs say."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.weights = nn.ParameterDict({n: nn.Parameter(zeros(s)) for n, s in SHAPES.items()})

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = self.weights["first"] * first, self.weights["second"] * second
        return first.sum() + second.sum()


@final
@dataclass(frozen=True, slots=True)
class WrongSum:
    """What a policy leaves in place of a sum.

    Attributes:
        error: relative to the largest element of the sum.
        count: micro-batches of the step.
        text: what is wrong, and what to do.
    """

    error: float
    count: int
    text: str


def find_wrong_sum(
    policy: SyncPolicy, lay_out: Callable[[nn.Module, Any], Parallel], world: World
) -> WrongSum | None:
    """Take a few steps of two small matrices whose gradient is known; 0.1 s. Collective.

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
                f"(relative error {error:.1g}): with lockstep=True wrap every micro-batch in "
                "model.reducing(across=True), else none, and end a step with model.reduce(used)"
            )
            return WrongSum(error, count, text)
    return None


def _error(policy: SyncPolicy, model: Parallel, world: World, count: int) -> float:
    """Take a step, and compare its gradient with the sum, the largest error of all ranks."""
    counts = [count + (rank % 2 and not policy.lockstep) for rank in range(world.size)]
    draw, sums = torch.Generator().manual_seed(count), dict[str, Tensor]()
    inputs = list[dict[str, Tensor]]()  # of this rank's micro-batches
    for rank, own in enumerate(counts):
        for _ in range(own):
            fields = {n: torch.randn(s, generator=draw).double() for n, s in SHAPES.items()}
            sums = {name: sums.get(name, 0.0) + value for name, value in fields.items()}
            inputs += [fields] if rank == world.rank else []
    policy.gather(model)
    for index, fields in enumerate(inputs):
        with policy.micro_batch(model, is_last=index == len(inputs) - 1):
            model.call({n: v.to(world.device) for n, v in fields.items()}).backward()
    model.used()
    model.make_room()
    policy.reduce(model, [True] * len(model.parameters))
    distances = [
        _distance(p, sums[name.rpartition(".")[2]].to(world.device))
        for name, p in model.module.named_parameters()
    ]
    model.drop_gradients()
    largest = max(float(total.abs().max()) for total in sums.values())
    return float(world.max(torch.stack(distances).max())) / largest


def _distance(parameter: nn.Parameter, expected: Tensor) -> Tensor:
    """Give the largest difference of the gradient that this rank has, 0-d."""
    grad: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if is_sharded(grad):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - half a second

        layout = grad.device_mesh, grad.placements
        expected = distribute_tensor(expected, *layout, src_data_rank=None).to_local()
        grad = grad.to_local()
    difference = torch.nan_to_num((grad - expected).abs(), nan=torch.inf)
    return torch.cat([difference.flatten(), difference.new_zeros(1)]).max()
