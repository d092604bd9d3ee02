"""What tests of sharded models let real ranks do; importable, so that other processes can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lib.ranks_work import POLICIES, plain
from tests.lib.support import VOCABULARY, Bench, RaggedText, replicated
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.models.meta_start import build_on_meta
from trainer.models.recompute import blocks_of, checkpoint_blocks
from trainer.objectives.next_token import NextToken
from trainer.parallel.base import Parallel
from trainer.parallel.fsdp import Sharded, fake_mesh
from trainer.plan.cuts import Fixed
from trainer.plan.memory import Shape
from trainer.training.step import train_step
from trainer.tune.predict import predict_peak
from trainer.tune.tensors import MemoryEstimate, PeakBytes
from trainer.tune.workload import Tiled, Workload

SMALL = {"num_heads": 2, "max_length": 32}


@dataclass(frozen=True)
class Load:
    """A sharded run whose memory is counted."""

    sync: str
    replicas: int = 1
    width: int = 48
    num_layers: int = 4
    micro: int = 4
    recompute: bool = False
    tied: bool = False


class Even(RaggedText):
    """Samples of one length."""

    def __init__(self, length: int = 24) -> None:
        super().__init__(num_samples=96)
        numbers = torch.Generator().manual_seed(0)
        self.lengths[:] = length
        self.samples = [
            torch.randint(0, VOCABULARY, (length,), generator=numbers) for _ in self.samples
        ]


def gpt(load: Load) -> GPT:
    shape = {"width": load.width, "num_layers": load.num_layers, "tied": load.tied}
    return GPT(VOCABULARY, **shape, **SMALL)


def measured(world: World, load: Load) -> MemoryEstimate:
    """The tensor bytes of this rank in two steps of two micro-batches."""
    peak = PeakBytes()

    def lay_out(module: nn.Module, world: World) -> Parallel:
        if load.recompute:
            checkpoint_blocks(module)
        blocks = blocks_of(module)
        return Sharded(module, bind(module), blocks, world, replicas=load.replicas)

    bench = Bench(
        Fixed(micro=load.micro),
        torch.float32,
        global_batch=2 * load.micro * world.size,
        dataset=Even(),
        model=lambda: gpt(load),
        clip_norm=1.0,
        world=world,
        lay_out=lay_out,
        sync=POLICIES[load.sync](),
    )
    with peak:
        peak.assign("parameters", bench.module.parameters())
        peak.assign("buffers", bench.module.buffers())
        for _ in range(2):
            train_step(bench.kit, bench.feed.next(), bench.feed)
    bench.feed.close()
    return peak.estimate


def predicted(world: World, load: Load) -> MemoryEstimate:
    """What the first rank predicts while the others wait."""

    def find() -> dict[str, int]:
        work = workload(load, world.size)
        return asdict(predict_peak(work, Shape(load.micro, 24), recompute=load.recompute))

    return MemoryEstimate(**world.on_main(find))


def workload(load: Load, size: int) -> Workload:
    example = {"input_ids": torch.zeros(1, 24, dtype=torch.int64)}

    @contextmanager
    def fake_ranks() -> Iterator[Callable[[nn.Module], Parallel]]:
        world = World(size=size, local_size=size)
        with fake_mesh(size, load.replicas) as mesh:
            yield lambda module: Sharded(
                module, bind(module), blocks_of(module), world, replicas=load.replicas, mesh=mesh
            )

    model, weights = build_on_meta(lambda: gpt(load))
    return Workload(
        model=model,
        objective=NextToken(),
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2),
        make_fields=Tiled({**example, "labels": example["input_ids"]}, 24),
        weights=weights,
        sync=POLICIES[load.sync](),
        fake_ranks=fake_ranks,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt_tiny": lambda: GPT(vocab_size=VOCABULARY),
    "like gpt2": lambda: GPT(
        VOCABULARY,
        **SMALL | {"width": 16, "num_layers": 2, "tied": True, "norm": "layer", "mlp": "gelu"},
        **{"positions": "learned", "bias": True, "init_std": 0.02},
    ),
}


def start_sharded(build: Callable[[], nn.Module], world: World) -> tuple[nn.Module, Parallel]:
    module, weights = build_on_meta(build)
    blocks = blocks_of(module)
    return module, Sharded(module, bind(module), blocks, world, draw=weights.draw)


def begun(world: World, name: str) -> dict[str, bool]:
    """Whether each tensor of a sharded model begins as on one rank; and the generator after it."""
    torch.manual_seed(11)
    whole, after = MODELS[name](), torch.rand(1)
    torch.manual_seed(11)
    module, _ = start_sharded(MODELS[name], world)
    answer = {"generator": torch.equal(torch.rand(1), after)}
    for (key, mine), theirs in zip(
        module.named_parameters(remove_duplicate=False),
        dict(whole.named_parameters(remove_duplicate=False)).values(),
        strict=True,
    ):
        assert isinstance(mine, DTensor)
        assert mine.requires_grad == theirs.requires_grad
        answer[key] = torch.equal(mine.full_tensor(), theirs)
    for (key, mine), (_, theirs) in zip(module.named_buffers(), whole.named_buffers(), strict=True):
        answer[key] = torch.equal(mine, theirs)
    return answer


class RealBytes(TorchDispatchMode):
    """Counts tensors that take memory, of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = PeakBytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        real = [t for t in leaves if not isinstance(t, FakeTensor) and not t.is_meta]
        self.peak.assign("activations", real)
        return result


def peak_at_start(world: World, is_deferred: bool) -> tuple[int, int, int]:
    """The most bytes that tensors take at once, those of the largest weight, and of all."""

    def build() -> nn.Module:
        return GPT(VOCABULARY, width=128, num_layers=8, num_heads=4, max_length=32)

    with RealBytes() as counted:
        if is_deferred:
            _, model = start_sharded(build, world)
        else:
            module = build()
            model = Sharded(module, bind(module), blocks_of(module), world)
    sizes = [parameter.nbytes for parameter in model.parameters]
    return counted.peak.estimate.peak_bytes, max(sizes), sum(sizes)


def trained(world: World, sync: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of three steps in float64; on one rank the model is built whole."""

    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return GPT(VOCABULARY, width=8, num_layers=2, tied=True, **SMALL)
        finally:
            torch.set_default_dtype(torch.float32)

    def lay_out(module: nn.Module, world: World) -> Parallel:
        return laid[0] if laid else replicated(module, world)

    torch.default_generator.manual_seed(0)
    laid: list[Parallel] = []
    if world.size > 1:
        laid.append(start_sharded(build, world)[1])
    bench = Bench(
        Fixed(micro=3),
        clip_norm=0.5,
        model=(lambda: laid[0].module) if laid else build,
        world=world,
        lay_out=lay_out,
        sync=POLICIES[sync](),
        optimizer=torch.optim.SGD,
    )
    losses = [float(train_step(bench.kit, bench.feed.next(), bench.feed).loss) for _ in range(3)]
    bench.feed.close()
    return losses, {name: plain(p) for name, p in bench.module.named_parameters()}


def both(world: World, load: Load) -> tuple[MemoryEstimate, MemoryEstimate]:
    return measured(world, load), predicted(world, load)
