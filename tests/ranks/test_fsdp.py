"""Sharded models: they start in less memory than they have, and need what was predicted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.lib.nightly import nightly, slow
from tests.lib.ranks_work import POLICIES, RealBytes, error, plain, start_sharded
from tests.lib.support import EXACT, VOCABULARY, Bench, RaggedText, replicated
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.models.first_weights import build_on_meta, drawn
from trainer.models.gpt import GPT
from trainer.models.recompute import blocks_of, checkpoint_blocks
from trainer.objectives.next_token import NextToken
from trainer.optim.optimizers import OwnOptimizer
from trainer.parallel.base import Parallel
from trainer.parallel.fsdp import Sharded, fake_mesh, make_mesh
from trainer.parallel.setup import ParallelSetup
from trainer.plan.cuts import Fixed
from trainer.plan.memory import Shape
from trainer.training.model import Model
from trainer.tune.peak_bytes import MemoryEstimate, PeakBytes
from trainer.tune.predict import predict_peak
from trainer.tune.workload import Tiled, Workload

TOLERANCE = 0.05
"""What the prediction of tensor bytes may be off."""

SMALL = {"num_heads": 2, "max_length": 32}


@dataclass(frozen=True)
class Load:
    """A run on several ranks, sharded unless of whole copies, whose memory is counted."""

    sync: str
    is_whole: bool = False
    replicas: int = 1
    width: int = 48
    num_layers: int = 4
    micro: int = 4
    recompute: bool = False
    tied: bool = False
    dtype: torch.dtype | None = None

    def bind(self, model: nn.Module) -> Callable[..., Any]:
        return bind(model, autocast=self.dtype)

    @property
    def setup(self) -> ParallelSetup:
        """Of whole copies."""
        return ParallelSetup(mode="ddp", replicas=1, sync=POLICIES[self.sync]())

    def build(self) -> GPT:
        shape = {"width": self.width, "num_layers": self.num_layers, "tied": self.tied}
        return GPT(VOCABULARY, **shape, **SMALL)

    def predict(self, size: int, shards: int = 0) -> MemoryEstimate:
        """What a run on so many ranks, or of more shards, is predicted to need of each."""
        tokens = torch.zeros(1, 24, dtype=torch.int64)

        @contextmanager
        def fake_ranks() -> Iterator[Callable[[nn.Module], Parallel]]:
            world = World(size=size, local_size=size)
            with fake_mesh(size, self.replicas) as mesh:
                call, dtype = self.bind, self.dtype
                yield lambda m: Sharded(m, call(m), blocks_of(m), world, mesh, dtype=dtype)

        whole = partial(self.setup.fake_ranks, size, self.bind, torch.device("cpu"))
        model, weights = (self.build(), None) if self.is_whole else build_on_meta(self.build)
        stage = Model(
            module=model,
            weights=weights,
            precision="fp32" if self.dtype is None else "bf16",
            objective=NextToken(),
            setup=self.setup,
            spec=OwnOptimizer.of(torch.optim.AdamW, {"lr": 1e-2}),
        )
        work = Workload(
            model=stage,
            make_fields=Tiled({"input_ids": tokens, "labels": tokens}, 24),
            fake_ranks=whole if self.is_whole else fake_ranks,
            shards=(size, shards or size),
        )
        return predict_peak(work, Shape(self.micro, 24), recompute=self.recompute)


def measured(world: World, load: Load) -> MemoryEstimate:
    """The tensor bytes of this rank in two steps of two micro-batches."""
    peak, data = PeakBytes(), RaggedText(num_samples=96)
    data.lengths[:] = 24
    data.samples = [torch.arange(24) % VOCABULARY] * 96

    def lay_out(module: nn.Module, world: World) -> Parallel:
        if load.recompute:
            checkpoint_blocks(module)
        if load.is_whole:
            return load.setup.lay_out(module, load.bind(module), world)
        call, mesh = load.bind(module), make_mesh(world, load.replicas)
        return Sharded(module, call, blocks_of(module), world, mesh, dtype=load.dtype)

    bench = Bench(
        Fixed(micro=load.micro),
        torch.float32,
        global_batch=2 * load.micro * world.size,
        dataset=data,
        model=load.build,
        clip_norm=1.0,
        world=world,
        lay_out=lay_out,
        sync=POLICIES[load.sync](),
    )
    with peak:
        peak.assign("parameters", bench.module.parameters())
        peak.assign("buffers", bench.module.buffers())
        for _ in range(2):
            bench.step()
    bench.feed.close()
    return peak.estimate


def both(world: World, load: Load) -> tuple[MemoryEstimate, MemoryEstimate]:
    """What is measured, and what the first rank predicts while the others wait."""
    found = measured(world, load)
    return found, MemoryEstimate(**world.on_main(lambda: asdict(load.predict(world.size))))


LOADS = [
    (2, Load("deferred", num_layers=2, tied=True)),
    nightly(3, Load("deferred", width=16, micro=10)),
    nightly(2, Load("immediate", dtype=torch.bfloat16)),
    slow(2, Load("immediate", recompute=True)),
    nightly(4, Load("hierarchical", replicas=2)),
    (2, Load("deferred", is_whole=True)),
    nightly(2, Load("overlapped", is_whole=True)),
]


@pytest.mark.parametrize(("size", "load"), LOADS, ids=str)
def test_the_predicted_peak_of_a_rank_is_the_measured_one(ranks, size, load):
    for found, predicted in ranks.run(size, both, load):
        assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("sync", ["deferred", slow("immediate")])
def test_of_many_ranks_few_are_run_whose_shards_shrink_to_those_of_all(sync):
    load = Load(sync, width=64, micro=1)
    few, every = load.predict(8, shards=32), load.predict(32)
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=5e-3)
    assert few.peak_bytes < 0.95 * load.predict(8).peak_bytes


def like_gpt2() -> nn.Module:
    shape = {"width": 16, "num_layers": 2, "tied": True, "norm": "layer", "mlp": "gelu"}
    how = {"positions": "learned", "bias": True, "init_std": 0.02}
    return GPT(VOCABULARY, **SMALL | shape, **how)


def begun(world: World) -> dict[str, bool]:
    """Whether each tensor of a sharded model begins as on one rank; and the generator after it."""
    torch.manual_seed(11)
    whole, after = like_gpt2(), torch.rand(1)
    torch.manual_seed(11)
    module, _ = start_sharded(like_gpt2, world)
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


def test_a_sharded_model_begins_with_the_very_weights_of_one_rank(ranks):
    for answer in ranks.run(3, begun):
        assert all(answer.values()), [key for key, same in answer.items() if not same]


def peak_at_start(world: World, is_deferred: bool) -> tuple[int, int, int]:
    """The most bytes that tensors take at once, those of the largest weight, and of all."""

    def build() -> nn.Module:
        return GPT(VOCABULARY, width=128, num_layers=8, num_heads=4, max_length=32)

    with RealBytes() as counted:
        if is_deferred:
            _, model = start_sharded(build, world)
        else:
            module = build()
            model = Sharded(module, bind(module), blocks_of(module), world, make_mesh(world))
    sizes = [parameter.nbytes for parameter in model.parameters]
    return counted.peak.estimate.peak_bytes, max(sizes), sum(sizes)


def test_a_model_larger_than_the_memory_of_a_rank_can_start(ranks):
    for peak, largest, whole in ranks.run(4, peak_at_start, True):
        # Shards, and one weight with its shard.
        assert whole / 4 < peak < whole / 4 + 3 * largest < whole / 2
    for peak, _, whole in ranks.run(2, peak_at_start, False):
        assert peak >= whole


def trained(world: World, sync: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of three steps in float64; on one rank the model is built whole."""

    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return GPT(VOCABULARY, width=8, num_layers=2, tied=True, **SMALL)
        finally:
            torch.set_default_dtype(torch.float32)

    torch.default_generator.manual_seed(0)
    how = {"model": build, "lay_out": replicated}
    if world.size > 1:
        module, laid = start_sharded(build, world)
        how = {"model": lambda: module, "lay_out": lambda *_: laid}
    how |= {"sync": POLICIES[sync](), "optimizer": torch.optim.SGD}
    bench = Bench(Fixed(micro=3), clip_norm=0.5, world=world, **how)
    losses = [float(bench.step().loss) for _ in range(3)]
    bench.feed.close()
    return losses, {name: plain(p) for name, p in bench.module.named_parameters()}


@pytest.mark.parametrize("sync", ["deferred", nightly("immediate")])
def test_a_model_that_was_never_whole_trains_as_on_one_rank(ranks, sync):
    losses, weights = trained(World(), "deferred")
    for mine, theirs in ranks.run(3, trained, sync):
        assert mine == pytest.approx(losses, rel=1e-12)
        assert error(theirs, weights) <= EXACT[torch.float64]


def test_a_model_on_meta_can_be_whole_for_a_while():
    torch.manual_seed(3)
    expected = like_gpt2()
    torch.manual_seed(3)
    module, weights = build_on_meta(like_gpt2)
    before = dict(module.named_parameters())
    with drawn(module, weights, torch.device("cpu")):
        pairs = zip(module.named_parameters(), expected.parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert torch.equal(mine, theirs), name
            assert mine.requires_grad == theirs.requires_grad
    assert all(p.is_meta and p is before[name] for name, p in module.named_parameters())
