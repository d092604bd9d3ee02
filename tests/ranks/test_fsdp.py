"""Sharded models: they start in less memory than they have, and need what was predicted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.lib.nightly import nightly
from tests.lib.ranks_work import (
    POLICIES,
    BlockLM,
    RealBytes,
    error,
    plain,
    sharded,
    start_sharded,
)
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

    def predict(self, size: int) -> MemoryEstimate:
        """What a run on so many ranks is predicted to need of each."""
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
    nightly(4, Load("deferred", replicas=2, tied=True)),
    nightly(3, Load("deferred", width=16, micro=10)),
    nightly(2, Load("deferred", dtype=torch.bfloat16)),
    nightly(2, Load("immediate", dtype=torch.bfloat16)),
    nightly(2, Load("immediate", recompute=True)),
    nightly(2, Load("immediate")),
    nightly(4, Load("hierarchical", replicas=2)),
    (2, Load("deferred", is_whole=True)),
    nightly(2, Load("overlapped", is_whole=True)),
    nightly(2, Load("immediate", is_whole=True)),
]


@pytest.mark.parametrize(("size", "load"), LOADS, ids=str)
def test_the_predicted_peak_of_a_rank_is_the_measured_one(ranks, size, load):
    for found, predicted in ranks.run(size, both, load):
        assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=TOLERANCE)


def predicted(_: World, loads: list[Load]) -> list[MemoryEstimate]:
    return [load.predict(2) for load in loads]


def test_the_parts_of_a_prediction_are_shards_and_what_a_window_gathers(ranks):
    # In a rank: autograd of a build for CUDA starts threads, and a fork must have none.
    (window, lockstep), _ = ranks.run(2, predicted, [Load("deferred"), Load("immediate")])
    shard = lockstep.parameters  # padded: 17 rows of the embedding are nine and eight
    assert window.parameters == pytest.approx(3 * shard, rel=0.01)
    assert window.gradients == pytest.approx(2 * shard, rel=0.01)
    assert window.optimizer_state == lockstep.optimizer_state == pytest.approx(2 * shard, rel=0.01)
    assert lockstep.peak_bytes < window.peak_bytes


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt_tiny": lambda: GPT(vocab_size=VOCABULARY),
    "like gpt2": lambda: GPT(
        VOCABULARY,
        **SMALL | {"width": 16, "num_layers": 2, "tied": True, "norm": "layer", "mlp": "gelu"},
        **{"positions": "learned", "bias": True, "init_std": 0.02},
    ),
}


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


@pytest.mark.parametrize("name", ["gpt_tiny", nightly("like gpt2")])
def test_a_sharded_model_begins_with_the_very_weights_of_one_rank(ranks, name):
    for answer in ranks.run(3, begun, name):
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


def trained(
    world: World, sync: str, vocabulary: int = VOCABULARY, steps: int = 3
) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of some steps in float64; on one rank the model is built whole."""

    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return GPT(vocabulary, width=8, num_layers=2, tied=True, **SMALL)
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
    losses = [float(bench.step().loss) for _ in range(steps)]
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
    expected = MODELS["like gpt2"]()
    torch.manual_seed(3)
    module, weights = build_on_meta(MODELS["like gpt2"])
    before = dict(module.named_parameters())
    with drawn(module, weights, torch.device("cpu")):
        for (name, mine), theirs in zip(
            module.named_parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name
            assert mine.requires_grad == theirs.requires_grad
    assert all(p.is_meta and p is before[name] for name, p in module.named_parameters())


MICRO_BATCHES = 64


def gradients_in(
    world: World, dtype: torch.dtype | None, sync: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Gradients of many micro-batches: reduced from shards, and what one process adds up.

    Of the latter in the type of the shards, and in that of a backward.
    """

    def gradients(call: Callable[..., Any], rank: int) -> Iterator[None]:
        for index in range(MICRO_BATCHES):
            ids = (torch.arange(12).view(2, 6) * (index + 1) + 7 * rank) % VOCABULARY
            last = index == MICRO_BATCHES - 1
            with model.micro_batch(is_last=last) if call is model.call else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                    logits = call({"input_ids": ids})
                logits.float().logsumexp(-1).sum().backward()
            yield

    torch.manual_seed(0)
    model = sharded(BlockLM(), world, dtype=dtype)
    model.begin(POLICIES[sync]())
    for _ in gradients(model.call, world.rank):
        pass
    used = model.used()
    model.make_room()
    model.reduce(used)
    found = {name: plain(p.grad) for name, p in model.module.named_parameters()}
    torch.manual_seed(0)
    alone = BlockLM().to(dtype)
    totals, shorts = ({n: [] for n, _ in alone.named_parameters()} for _ in range(2))
    for rank in range(world.size):
        for _ in gradients(bind(alone), rank):
            for name, parameter in alone.named_parameters():
                for sums, grad in ((totals, parameter.grad.float()), (shorts, parameter.grad)):
                    mine = sums[name][rank:]
                    sums[name][rank:] = [mine[0] + grad if mine else grad]
                parameter.grad = None
    added = [{n: plain(a.float() + b.float()) for n, (a, b) in s.items()} for s in (totals, shorts)]
    return found, *added


@pytest.mark.parametrize("sync", ["deferred", nightly("immediate")])
def test_gradients_of_parameters_gathered_in_bf16_are_added_up_and_reduced_in_fp32(ranks, sync):
    for found, in_fp32, in_bf16 in ranks.run(2, gradients_in, torch.bfloat16, sync):
        assert error(found, in_fp32) < 1e-6
        assert error(found, in_bf16) > 1e-3
