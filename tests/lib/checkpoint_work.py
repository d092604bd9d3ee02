"""What tests of checkpoints let real ranks do; importable, so that other processes can."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.lib.sharded_work import RealBytes, start_sharded
from tests.lib.support import VOCABULARY
from trainer.checkpoint.state import assert_finite, capture, restore
from trainer.checkpoint.store import CheckpointStore, CheckpointWriter
from trainer.checkpoint.weights import load_weights
from trainer.core import durable
from trainer.core.errors import NoCheckpointError, NonFiniteError, SaveError
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.parallel.fsdp import Sharded


class Layout(NamedTuple):
    """How many ranks hold a model, and how."""

    size: int
    mode: str


class Net(nn.Module):
    """Every awkward kind of tensor: uneven, one row, tied, frozen, unused, 0-d, bf16, no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.embed = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.row = nn.Parameter(torch.randn(1, 7))
        self.idle = nn.Parameter(torch.randn(3, 2))
        self.frozen = nn.Parameter(torch.randn(6, 7), requires_grad=False)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("mark", torch.randn(3).bfloat16())
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(self.embed(x) * self.row) + self.head(x)
        return x @ self.frozen.t()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in trained if p.dim() > 1], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def laid_out(world: World, layout: Layout, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = Net()
    module.norm.running_mean.normal_()
    if layout.mode in {"fsdp", "hsdp"}:
        replicas = 2 if layout.mode == "hsdp" else 1
        Sharded(module, bind(module), [*module.blocks], world, replicas=replicas)
    return module


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Give every rank the same data, so that the mean over ranks is each one's gradient."""
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def digests(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Spell out the whole state, gathered by PyTorch."""
    tensors, meta = capture(module, optimizer, extra={})
    answer = {"meta": repr({k: v for k, v in meta.items() if k != "rng"})}
    for name, tensor in tensors.items():
        if not name.startswith("rng."):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            bits = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = f"{whole.dtype} {list(whole.shape)} "
            answer[name] = kind + hashlib.sha256(bits).hexdigest()
    return answer


def begun(world: World, layout: Layout, folder: Path) -> dict[str, str]:
    """Train a little and save step 1; gives what was saved."""
    module = laid_out(world, layout, seed=0)
    optimizer = adamw(module)
    train(module, optimizer, 2)
    tensors, meta = capture(module, optimizer, extra={"rank": world.rank})
    CheckpointWriter(CheckpointStore(folder), world).save(1, tensors, meta)
    return digests(module, optimizer)


def passed_on(world: World, layout: Layout, folder: Path, step: int) -> tuple[dict[str, str], bool]:
    """Restore into a model that began otherwise, and save; whether tied weights are tied, too."""
    store = CheckpointStore(folder)
    module = laid_out(world, layout, seed=step + 5)
    optimizer = adamw(module)
    extra = restore(store.load(step, world=world), module, optimizer)
    assert extra == {"rank": 0}
    found = digests(module, optimizer)
    writer = CheckpointWriter(store, world, asynchronous=True)
    writer.save(step + 1, *capture(module, optimizer, extra=extra))
    train(module, optimizer, 1)
    assert writer.close() == store.path(step + 1)
    return found, module.head.weight is module.embed.weight


def initial(world: World, layout: Layout, path: Path) -> dict[str, str]:
    """Take over weights alone."""
    module = laid_out(world, layout, seed=77)
    load_weights(module, path, world)
    return digests(module, torch.optim.SGD([module.row]))


def refused(world: World, folder: Path, where: str) -> list[str]:
    """Save where one rank's disk refuses or its state is not finite; gives what each call said."""

    class Full(durable.FileSystem):
        def create(self, path: Path) -> int:
            if "rank" in path.name:
                raise OSError(28, "No space left on device")
            return super().create(path)

    module = laid_out(world, Layout(world.size, "fsdp"), seed=0)
    optimizer = adamw(module)
    train(module, optimizer, 1)
    if where == "state" and world.rank == 1:
        module.embed.weight.to_local().data[0, 0] = float("nan")
    disk = Full() if (where, world.rank) == ("disk", 1) else durable.FileSystem()
    shown = []
    for is_behind in (False, True):
        writer = CheckpointWriter(CheckpointStore(folder), world, asynchronous=is_behind)
        tensors, meta = capture(module, optimizer, extra={})
        try:
            with durable.use(disk):
                world.on_all(lambda tensors=tensors: assert_finite(tensors))
                writer.save(1, tensors, meta)
                writer.close()
        except (SaveError, NonFiniteError) as error:
            shown.append(str(error))
    return shown


def read(world: World, folder: Path) -> int | str:
    """Load the newest intact checkpoint: its step, or why not."""
    try:
        return CheckpointStore(folder).load(world=world).step
    except NoCheckpointError as error:
        return str(error)


def gpt() -> nn.Module:
    return GPT(VOCABULARY, width=64, num_layers=4, num_heads=4, max_length=32)


def peaks(world: World, folder: Path, how: str) -> dict[str, Any]:
    """The most tensor bytes beyond the shards while saving or loading; the shard and all bytes."""
    module = gpt() if how == "whole" else start_sharded(gpt, world)[0]
    parameters, store = [*module.parameters()], CheckpointStore(folder)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if how != "load":  # moments of every parameter, without the memory of a step
        for p in parameters:
            optimizer.state[p] = {"step": torch.tensor(1.0)}
            optimizer.state[p] |= {"exp_avg": p.detach() * 2, "exp_avg_sq": p.detach() * 3}
    writer = CheckpointWriter(store, world, asynchronous=how == "behind")
    with RealBytes() as counted:
        counted.peak.assign("parameters", parameters)
        owned = [t for state in optimizer.state.values() for t in state.values()]
        counted.peak.assign("optimizer_state", owned)
        if how == "load":
            restore(store.load(world=world), module, optimizer)
        else:
            writer.save(1, *capture(module, optimizer, extra={}))
    writer.close()
    own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "peak": counted.peak.estimate.peak_bytes,
        "shard": 3 * sum(p.nbytes for p in own),
        "whole": 3 * sum(p.nbytes for p in parameters),
        "largest": max(p.nbytes for p in parameters),
        "digest": digests(module, optimizer),
    }
