"""What every parallel mode and sync policy costs over gloo, predicted and measured side by side.

    python benchmarks/sync.py --ranks 2 --width 1024 --depth 24 --steps 8

Once on loopback, and once between two network namespaces whose link is shaped to 1 Gbit/s, where
this machine lets us make them (root, `ip`, `tc`); else that table is left out, and it is said why.
Half of the ranks live in each namespace.

    s/step   the shortest of some steps
    MiB      sent per rank and step: counted by the network interface; 2 to 4 % of it are headers
    unsharded  whole parameters and gradients, the most alive at once; beside it, the table's
    hidden   share of the communication that computing hides: a step with almost nothing to compute
             says what all of it takes; "-" where that is too little to tell. With gloo it is
             nothing by design: its collectives run when micro-batches are done (deferred), or make
             the host wait inside of them (immediate)

The first row of a mode is the one that `sync=auto` takes on a CPU where it fits.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.core.world import World
from trainer.models.bind import bind
from trainer.parallel.base import Parallel, Replicated
from trainer.parallel.fsdp import Sharded, make_mesh
from trainer.parallel.fsdp_calls import _groups
from trainer.parallel.setup import POLICIES, ParallelSetup
from trainer.parallel.sync import Deferred, SyncPolicy
from trainer.plan.traffic import ModelBytes

MEBI = 2**20
TELLING = 0.1
"""Share of a step below which what travels is lost in the noise of timing."""

RATE = "1gbit"
COLUMNS = (
    "mode",
    "policy",
    "s/step",
    "MiB",
    "predicted",
    "unsharded",
    "predicted",
    "hidden",
)
WIDTHS = (5, 13, 9, 9, 11, 11, 11, 8)


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


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one policy: seconds, bytes and a share."""

    seconds: float
    sent: float
    unsharded: int
    hidden: float | None


def lay_out(mode: str, module: nn.Module, world: World) -> Parallel:
    """Lay a model out over the ranks."""
    call = bind(module)
    if mode in ("none", "ddp"):
        return Replicated(module, call, list(module.parameters()), world)
    mesh = make_mesh(world, 2 if mode == "hsdp" else 1)
    return Sharded(module, call, list(module.blocks), world, mesh)


def step(model: Parallel, sync: SyncPolicy, rows: Tensor, num_micro_batches: int) -> int:
    """Accumulate and reduce one gradient; gives the most bytes of parameters and gradients."""
    most = 0
    model.begin(sync)
    for index in range(num_micro_batches):
        with model.micro_batch(is_last=index == num_micro_batches - 1):
            model.call({"x": rows}).square().sum().backward()
            most = max(most, unsharded_bytes(model))
    model.used()
    model.make_room()
    model.reduce([True] * len(model.parameters))
    model.drop_gradients()
    return most


def unsharded_bytes(model: Parallel) -> int:
    """Count the bytes of whole parameters and whole gradients that are alive."""
    tensors: list[Tensor | None] = []
    if isinstance(model, Sharded):
        units = [unit for unit in model.module.modules() if isinstance(unit, FSDPModule)]
        groups = [group for unit in units for group in _groups(unit._get_fsdp_state())]
        for part in (part for group in groups for part in group.fsdp_params):
            whole = getattr(part, "_unsharded_param", None)
            tensors += [whole, getattr(whole, "grad", None), part.unsharded_accumulated_grad]
    else:
        tensors += [*model.parameters, *model.gradients()]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None
    }
    return sum(storage.nbytes() for storage in storages.values())


def sent_bytes() -> int:
    """Read what the interfaces of this process's network have sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def shortest(world: World, repeats: int, *tasks: Callable[[], object]) -> list[float]:
    """Time tasks in turn, so that a disturbance meets all alike, after a round that warms up.

    Returns:
        The shortest time of each, as the first rank measured it, the same on every rank.
    """
    best = [float("inf")] * len(tasks)
    for _ in range(repeats + 1):
        for index, task in enumerate(tasks):
            world.barrier()
            began = time.perf_counter()
            task()
            best[index] = min(best[index], time.perf_counter() - began)
    return world.sum_numbers(best if world.is_main else [0.0] * len(tasks))


def measure(world: World, mode: str, sync: SyncPolicy, options: argparse.Namespace) -> Row:
    """Measure one policy on a fresh model."""
    model = lay_out(mode, Stack(options.width, options.depth), world)
    alone = lay_out("none", Stack(options.width, options.depth), World())
    rows, few = torch.randn(options.rows, options.width), torch.randn(1, options.width)
    seconds, travelling, computing, idle = shortest(
        world,
        options.repeats,
        lambda: step(model, sync, rows, options.steps),
        lambda: step(model, sync, few, options.steps),
        lambda: step(alone, Deferred(), rows, options.steps),
        lambda: step(alone, Deferred(), few, options.steps),
    )
    world.barrier()
    before = sent_bytes()
    most = step(model, sync, rows, options.steps)
    world.barrier()
    sent = (sent_bytes() - before) / options.sharers
    travelling -= idle
    hidden = None
    if travelling > TELLING * seconds:
        hidden = min(1.0, max(0.0, (travelling + computing - seconds) / travelling))
    return Row(seconds=seconds, sent=sent, unsharded=most, hidden=hidden)


def setup_of(mode: str, world: World, options: argparse.Namespace) -> ParallelSetup:
    """Say what is counted."""
    parameters = list(Stack(options.width, options.depth).parameters())
    replicas = {"ddp": world.size, "fsdp": 1, "hsdp": 2}[mode]
    sizes = ModelBytes(
        mode=mode,
        model_bytes=sum(p.nbytes for p in parameters),
        shard=world.size // replicas,
        replicas=replicas,
        limit_bytes=2**34,
        scatters_whole=True,  # gloo does
    )
    return ParallelSetup(mode=mode, replicas=replicas, sync=Deferred(), sizes=sizes)


def compare(world: World, options: argparse.Namespace) -> None:
    """Print the table, on the first rank."""

    def say(*words: str) -> None:
        if world.is_main:
            print("".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=False)))

    alone = lay_out("none", Stack(options.width, options.depth), World())
    rows = torch.randn(options.rows, options.width)
    [computing] = shortest(
        world, options.repeats, lambda: step(alone, Deferred(), rows, options.steps)
    )
    if world.is_main:
        print(f"\n{options.title}")
    say(*COLUMNS)
    say("none", "", f"{computing:.3f}")
    for mode in ["ddp", "fsdp"] + (["hsdp"] if world.size % 2 == 0 and world.size > 2 else []):
        rows_of_mode = setup_of(mode, world, options).counted(options.steps).rows
        policies = {policy.name: policy for policy in POLICIES}
        for row in rows_of_mode:
            seen = measure(world, mode, policies[row.policy], options)
            say(
                mode,
                row.policy,
                f"{seen.seconds:.3f}",
                f"{seen.sent / MEBI:.1f}",
                f"{row.sent / MEBI:.1f}",
                f"{seen.unsharded / MEBI:.1f}",
                f"{row.unsharded_bytes / MEBI:.1f}",
                "-" if seen.hidden is None else f"{100 * seen.hidden:.0f}%",
            )


def be_rank(options: argparse.Namespace) -> None:
    """Join the others, and measure."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.meeting}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=600),
    )
    torch.manual_seed(0)
    compare(
        World(rank=options.rank, size=options.ranks, long_timeout_group=dist.new_group()), options
    )
    gc.collect()  # models that outlive their groups abort the process
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(prefixes: Sequence[Sequence[str]], title: str, sharers: int) -> int:
    """Start one rank behind each prefix, and wait for all.

    Args:
        prefixes: what a rank's command begins with.
        title: of the table.
        sharers: ranks whose bytes one network's interfaces count together.
    """
    with tempfile.TemporaryDirectory() as folder:
        more = ["--meeting", str(Path(folder) / "meeting"), "--title", title]
        more += ["--sharers", str(sharers)]
        ranks = [
            subprocess.Popen(
                [*prefix, sys.executable, __file__, *sys.argv[1:], *more, "--rank", str(rank)]
            )
            for rank, prefix in enumerate(prefixes)
        ]
        return max(rank.wait() for rank in ranks)


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Make network namespaces of our own, two of them linked at the stated rate.

    Yields:
        Their names.

    Raises:
        OSError: this machine does not let us.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise OSError("needs root, `ip` and `tc`")
    names = [f"sync-{os.getpid()}-{index}" for index in range(count)]
    with ExitStack() as left:
        for name in names:
            _do("ip", "netns", "add", name)
            left.callback(_do, "ip", "netns", "delete", name)
            _inside(name, "ip", "link", "set", "lo", "up")
        if count > 1:
            first, second = names
            peer = ("peer", "name", "wire", "netns", second)
            _inside(first, "ip", "link", "add", "wire", "type", "veth", *peer)
            for index, name in enumerate(names, start=1):
                _inside(name, "ip", "address", "add", f"10.213.7.{index}/24", "dev", "wire")
                _inside(name, "ip", "link", "set", "wire", "up")
                limits = ("rate", RATE, "burst", "256kb", "latency", "50ms")
                _inside(name, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limits)
        yield names


def _inside(name: str, *command: str) -> None:
    _do("ip", "netns", "exec", name, *command)


def _do(*command: str) -> None:
    """Run a command of the system.

    Raises:
        OSError: it failed.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--repeats", type=int, default=3)
    for hidden in ("rank", "sharers"):
        parser.add_argument(f"--{hidden}", type=int, help=argparse.SUPPRESS)
    for hidden in ("meeting", "title"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options)
        return
    code = 0
    for count, title in ((1, "loopback"), (2, f"two namespaces, {RATE} between them")):
        try:
            with namespaces(count) as names:
                prefixes = [
                    ["ip", "netns", "exec", names[rank * count // options.ranks]]
                    + (["env", "GLOO_SOCKET_IFNAME=wire"] if count > 1 else [])
                    for rank in range(options.ranks)
                ]
                code |= run_ranks(prefixes, title, options.ranks // count)
        except OSError as error:
            print(f"\n{title}: left out, since this machine does not let us: {error}")
            if count == 1:
                code |= run_ranks([[]] * options.ranks, "loopback", options.ranks)
    sys.exit(code)


if __name__ == "__main__":
    main()
