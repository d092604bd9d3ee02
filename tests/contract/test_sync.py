"""What a policy costs, how one is chosen, and what a model laid out over ranks refuses."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lib.ranks_work import Collectives
from trainer.accumulate.model_state import ModelState
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.parallel.base import Parallel, Replicated
from trainer.parallel.fsdp import Sharded, fake_mesh
from trainer.parallel.setup import ParallelSetup
from trainer.parallel.sync import Deferred, Immediate, Overlapped
from trainer.plan.cut import Layout
from trainer.plan.cuts import LayoutInvariant
from trainer.plan.traffic import ModelBytes

GIGA = 2**30
ROOMY = 64 * GIGA
MODES = {"ddp": 8, "fsdp": 1, "hsdp": 2}


def setup_of(mode: str, *, sync=None, limit: int = ROOMY) -> ParallelSetup:
    replicas = MODES[mode]
    sizes = {"model_bytes": GIGA, "limit_bytes": limit, "shard": 8 // replicas}
    sizes = ModelBytes(mode=mode, replicas=replicas, **sizes)
    return ParallelSetup(
        mode=mode, replicas=replicas, sync=sync or Deferred(), sizes=sizes, is_open=sync is None
    )


@pytest.mark.parametrize(
    ("mode", "limit", "overlaps", "begun", "expected"),
    [
        ("ddp", ROOMY, False, None, "deferred"),
        ("ddp", ROOMY, True, None, "overlapped"),
        ("ddp", GIGA, False, None, "deferred"),  # there is no way to hold less
        ("fsdp", ROOMY, True, None, "deferred"),
        ("fsdp", GIGA, True, None, "immediate"),
        ("hsdp", GIGA, False, None, "hierarchical"),
        ("hsdp", ROOMY, False, "hierarchical", "hierarchical"),
        ("ddp", ROOMY, True, "deferred", "deferred"),
        ("fsdp", GIGA, False, "deferred", "immediate"),
    ],
)
def test_auto_reduces_once_a_step_where_that_fits_and_stays_what_it_was_while_it_fits(
    mode, limit, overlaps, begun, expected
):
    assert setup_of(mode, limit=limit).chosen(begun, overlaps=overlaps).sync.name == expected


def test_the_table_and_its_line_hold_the_bytes_of_ring_collectives():
    deferred, _, immediate = setup_of("ddp").counted(8).rows
    assert deferred.across == pytest.approx(2 * GIGA * 7 / 8)
    assert immediate.across == pytest.approx(8 * deferred.across)
    setup = setup_of("fsdp")  # of shards that are gathered in two bytes
    sizes = replace(setup.sizes, gathered_bytes=setup.sizes.model_bytes // 2)
    row, *_ = replace(setup, sizes=sizes).counted(8).rows
    assert row.within == pytest.approx((GIGA / 2 + GIGA) * 7 / 8)
    assert row.unsharded_bytes == GIGA * 3 // 2
    assert setup.chosen(None, overlaps=False).counted(8).why == (
        "sync=auto takes deferred: deferred sends 1.75 GiB per step; "
        "immediate sends 21.0 GiB per step"
    )
    line = setup_of("fsdp", limit=GIGA).chosen(None, overlaps=False).counted(8).why
    assert "takes immediate: " in line
    assert "and its 2.00 GiB of gradients do not fit" in line
    assert setup_of("fsdp", sync=Immediate()).counted(8).why is None


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_micro_batches_of_a_layout_do_not_depend_on_the_ranks(size, micro, ranks, seed, packed):
    lengths = np.random.default_rng(seed).integers(1, 40, size).astype(np.int64)
    alone = LayoutInvariant(micro=micro).cut(lengths, Layout(packed=packed))
    shared = LayoutInvariant(micro=micro).cut(lengths, Layout(world_size=ranks, packed=packed))
    shared.check(Layout(world_size=ranks, packed=packed))
    for plan in (alone, shared):
        assert max(len(slot) for slots in plan.ranks for slot in slots) <= micro
    flat = [slot.tolist() for slots in shared.ranks for slot in slots]
    assert flat == [slot.tolist() for slot in alone.ranks[0]]
    assert sum(shared.padded_lengths, ()) == alone.padded_lengths[0]


class Fickle(nn.Module):
    """Three blocks, used in an order of its own every time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return x


@pytest.mark.parametrize(
    ("order", "says", "trained"),
    [
        ((0, 2), "reaches blocks.2 where the first reaches blocks.1", True),
        ((0, 1), "reaches its end where the first reaches blocks.2", False),
        ((0, 1, 1, 2), "reaches blocks.1 where the first reaches blocks.2", True),
        ((0, 1, 2), None, False),
    ],
)
def test_a_micro_batch_that_uses_other_blocks_is_refused_before_it_sends(order, says, trained):
    module, world = Fickle(), World(size=2, local_size=2)
    with fake_mesh(2, 1) as mesh:
        model = Sharded(module, bind(module), list(module.blocks), world, mesh)
        model.begin(Immediate())
        expected = nullcontext() if says is None else pytest.raises(ConfigError, match=says)
        rows = torch.ones(2, 2, requires_grad=trained)  # else the first block has no backward
        with model.micro_batch(is_last=False):
            model.call({"x": rows}).sum().backward()
        module.order = order
        with expected, model.micro_batch(is_last=True):
            model.call({"x": rows}).sum().backward()


def backward_each(model: Parallel, *, is_last: bool) -> list[int]:
    """How many buckets were sent before backward came to each block, and in the end."""
    sent: list[int] = []
    with Collectives() as counter, model.micro_batch(is_last=is_last):
        handles = [
            block.weight.register_hook(lambda _: sent.append(counter.counts["allreduce"]))
            for block in model.module.blocks
        ]
        model.call({"x": torch.ones(2, 2)}).sum().backward()
    for handle in handles:
        handle.remove()
    return [*sent, counter.counts["allreduce"]]


def test_buckets_are_sent_as_the_last_backward_fills_them_and_not_before():
    module = Fickle()
    with fake_mesh(2, 1):
        world = World(size=2, local_size=2, long_timeout_group=dist.group.WORLD)
        model = Replicated(module, bind(module), [*module.parameters()], world, bucket_bytes=24)
        model.begin(Overlapped())
        assert backward_each(model, is_last=False) == [0, 0, 0, 0]
        assert backward_each(model, is_last=True) == [0, 1, 2, 3]
        model.drop_gradients()
        model.begin(Overlapped())
        module.order = (0, 2)  # a block that this rank does not use holds back those behind it
        assert backward_each(model, is_last=True)[-1] == 1
        used = model.used()
        assert used == [True, True, False, False, True, True]
        with Collectives() as counter:
            model.make_room()
        assert counter.counts["allreduce"] == 2
        model.reduce(used)
        assert [p.grad is not None for p in model.parameters] == used


def test_a_second_backward_after_gradients_were_sent_is_refused():
    module = Fickle()
    with fake_mesh(2, 1):
        world = World(size=2, local_size=2, long_timeout_group=dist.group.WORLD)
        model = Replicated(module, bind(module), [*module.parameters()], world)
        model.begin(Overlapped())
        with model.micro_batch(is_last=True):
            model.call({"x": torch.ones(2, 2)}).sum().backward()
            with pytest.raises(ConfigError, match="sync=overlapped: the last micro-batch has a"):
                model.call({"x": torch.ones(2, 2)}).sum().backward()
        model.drop_gradients()


class Writing(Fickle):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].book = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].book.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_forward_that_writes_into_a_shard_is_refused_by_name(lockstep):
    module, world = Writing(), World(size=2, local_size=2)
    with fake_mesh(2, 1) as mesh:
        model = Sharded(module, bind(module), [], world, mesh)
        model.begin(Immediate() if lockstep else Deferred())
        with model.micro_batch(is_last=True):
            model.call({"x": torch.ones(2, 2)}).sum().backward()
        with pytest.raises(ConfigError, match=r"writes into blocks\.1\.book, a"):
            model.used()


def test_a_frozen_parameter_that_a_forward_writes_is_refused_on_several_ranks():
    module = Writing()
    for size in (1, 2):
        state = ModelState(module, World(size=size))
        state.watch()
        module(torch.ones(2, 2))
        says = pytest.raises(ConfigError, match=r"into blocks\.1\.book")
        with says if size > 1 else nullcontext():
            state.check()


def test_a_buffer_that_moves_is_refused_where_bits_are_to_be_those_of_every_layout():
    module = Fickle()
    module.register_buffer("seen", torch.zeros(1))
    state = ModelState(module, World(), is_ordered=True)
    state.watch()
    state.check()
    module.seen.data.add_(1)
    with pytest.raises(ConfigError, match="deterministic=layout: forward updates seen"):
        state.check()
