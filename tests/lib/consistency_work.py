"""Models and layouts that ranks may not agree on; importable, so that other processes can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.lib.ranks_work import plain
from trainer.build.checks import check_consistency
from trainer.core.errors import TrainError
from trainer.core.world import World
from trainer.data.view import DataView
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.models.meta_start import build_on_meta
from trainer.models.recompute import separable_blocks
from trainer.parallel.fsdp import Sharded


class Numbers(list[int]):
    """A data set of one token per sample."""

    fingerprint = "as it was"

    @property
    def lengths(self) -> list[int]:
        return [1] * len(self)


def built(how: str, rank: int) -> nn.Module:
    """A model that begins the same on all ranks, except where `how` says."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2500))
    with torch.no_grad():
        if how == "governed":
            model[0].weight.copy_(torch.from_numpy(np.random.rand(4, 3)))
        if how == "ungoverned":
            model[0].weight.copy_(torch.from_numpy(np.random.default_rng().random((4, 3))))
        if how == "rank":
            model[2].weight[2000, 3] = 0.5 + rank
        if how == "buffer":
            model[1].running_mean.fill_(rank)
    if how == "strided":
        model.register_parameter("gain", nn.Parameter(torch.ones(1, 2)[:, 1]))
        model.register_buffer("mean", torch.ones(2)[::2])
    if how == "names":
        model.register_parameter(f"own{rank}", nn.Parameter(torch.ones(1)))
    if how == "frozen":
        model[0].weight.requires_grad_(rank == 0)
    return model


def refusal(check: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    """What a check refuses with; nothing where it does not."""
    try:
        check(*arguments, **more)
    except TrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_models(world: World, ways: list[str], begins: bool = True) -> list[str]:
    found = []
    for how in ways:
        module, weights = built(how, world.rank), None
        if how.startswith("on meta"):
            torch.manual_seed(world.rank if how == "on meta, by rank" else 0)
            module, weights = build_on_meta(lambda: GPT(width=8, num_heads=2))
        found.append(refusal(check_consistency, world, [], module, weights, begins=begins))
    return found


def refused_data(world: World, ways: list[str]) -> list[str]:
    found = []
    for how in ways:
        data: Any = Numbers(range(5 + world.rank * (how == "lengths")))
        if how == "fingerprint" and world.rank == 1:
            data.fingerprint = "changed"
        found.append(
            refusal(check_consistency, world, [DataView.of(data)], nn.Module(), None, begins=True)
        )
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain


class Shared(nn.Module):
    """Three blocks, of which the first shares something as `how` says."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 4)
        if how == "module":
            self.blocks[2].linear = self.blocks[0].linear
        if how == "parameter":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight
        if how == "head":
            self.head.weight = self.blocks[0].linear.weight
        if how == "block":
            self.blocks[2] = self.blocks[0]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shared(how: str) -> Shared:
    torch.manual_seed(0)
    return Shared(how)


def gradients(world: World, how: str, in_lockstep: bool) -> dict[str, Any]:
    """The summed gradient of rows that ranks share out, two micro-batches each."""
    rows = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = shared(how)
    if world.size == 1:
        module(rows).square().sum().backward()
        return {name: plain(p.grad) for name, p in module.named_parameters()}
    model = Sharded(module, bind(module), separable_blocks(module), world)
    mine = rows[world.rank :: world.size].split(3)
    if in_lockstep:
        model.begin_lockstep()
    else:
        model.gather()
    for micro in mine:
        batch = {"x": micro}
        if in_lockstep:
            with model.reducing(across=True):
                model.call(batch).square().sum().backward()
        else:
            model.call(batch).square().sum().backward()
    model.reduce([True] * len(model.parameters))
    return {name: plain(p.grad) for name, p in module.named_parameters()}


def refused_types(world: World) -> str:
    module = shared("")
    module.blocks[1].gain.data = module.blocks[1].gain.data.float()
    return refusal(Sharded, module, bind(module), separable_blocks(module), world)
