"""Time per step and bytes sent, for every parallel mode and sync policy over gloo on loopback.

    python benchmarks/sync.py --ranks 2 --width 512 --steps 8

The predicted columns are those of `trainer.plan.traffic`, which `sync=auto` decides by.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.models.bind import bind
from trainer.parallel import Parallel, Replicated
from trainer.parallel.sharded import Sharded
from trainer.plan.traffic import table
from trainer.sync import Deferred, Hierarchical, Immediate, SyncPolicy
from trainer.world import World

POLICIES: dict[str, SyncPolicy] = {
    "deferred": Deferred(),
    "immediate": Immediate(),
    "hierarchical": Hierarchical(),
}
MEBI = 2**20
REPEATS = 3


class Stack(nn.Module):
    """Square layers, the cheapest way to many parameters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(rows, width)` to the same shape."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def lay_out(mode: str, module: nn.Module, world: World) -> Parallel:
    """Lay a model out over the ranks."""
    call = bind(module)
    if mode == "ddp":
        return Replicated(module, call, list(module.parameters()), world)
    replicas = 2 if mode == "hsdp" else 1
    return Sharded(module, call, list(module.blocks), world, replicas=replicas)


def step(model: Parallel, sync: SyncPolicy, rows: Tensor, num_micro_batches: int) -> None:
    """Accumulate and reduce one gradient."""
    sync.gather(model)
    for index in range(num_micro_batches):
        with sync.micro_batch(model, is_last=index == num_micro_batches - 1):
            model.call({"x": rows}).square().sum().backward()
    sync.reduce(model, [True] * len(model.parameters))
    model.drop_gradients()


def measure(world: World, options: argparse.Namespace) -> None:
    """Print the table, on the first rank."""
    rows = torch.randn(options.rows, options.width)
    head = ("mode", "policy", "s/step", "MiB sent*", "MiB held*", "fits*")
    if world.is_main:
        print(("{:<6}{:<14}" + "{:>11}" * 4).format(*head), "  (* predicted)")
    modes = ["ddp", "fsdp"] + (["hsdp"] if world.size % 2 == 0 and world.size > 2 else [])
    for mode in modes:
        torch.manual_seed(0)
        module = Stack(options.width, options.depth)
        size = sum(p.nbytes for p in module.parameters())
        replicas = {"ddp": world.size, "fsdp": 1, "hsdp": 2}[mode]
        predicted = table(
            mode,  # type: ignore[arg-type]
            model_bytes=size,
            num_micro_batches=options.steps,
            shard=world.size // replicas,
            replicas=replicas,
            limit_bytes=2**34,
        )
        model = lay_out(mode, module, world)
        for row in predicted:
            sync = POLICIES[row.policy]
            step(model, sync, rows, options.steps)
            times = []
            for _ in range(REPEATS):
                world.barrier()
                began = time.perf_counter()
                step(model, sync, rows, options.steps)
                times.append(time.perf_counter() - began)
            if world.is_main:
                sent, held = (row.within + row.across) / MEBI, row.held / MEBI
                print(
                    f"{mode:<6}{row.policy:<14}{min(times):>11.3f}{sent:>11.1f}{held:>11.1f}"
                    f"{row.fits!s:>11}"
                )


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        with tempfile.TemporaryDirectory() as folder:
            more = [*sys.argv[1:], "--meeting", str(Path(folder) / "meeting")]
            ranks = [
                subprocess.Popen([sys.executable, __file__, *more, "--rank", str(rank)])
                for rank in range(options.ranks)
            ]
            sys.exit(max(rank.wait() for rank in ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.meeting}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=120),
    )
    measure(World(rank=options.rank, size=options.ranks, patient=dist.new_group()), options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
