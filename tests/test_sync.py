"""What a policy costs, how one is chosen, and how a process learns that it is one of several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.board import Board, Place
from trainer.errors import ConfigError, DoesNotFitError
from trainer.membership import membership
from trainer.models.bind import bind
from trainer.parallel.ordered import Ordered
from trainer.plan.cut import Layout
from trainer.plan.leaves import Leaves
from trainer.plan.traffic import cheapest, table
from trainer.world import World

GIGA = 2**30
MEETING = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}


def rows(mode: str, limit: float = 64 * GIGA, replicas: int = 1, micro_batches: int = 8):
    shard = 1 if mode == "ddp" else 8 // replicas
    return table(
        mode,
        model_bytes=GIGA,
        num_micro_batches=micro_batches,
        shard=shard,
        replicas=8 if mode == "ddp" else replicas,
        limit_bytes=int(limit),
    )


def test_one_reduction_a_step_wins_where_the_window_fits_in_memory():
    for mode, replicas in (("ddp", 1), ("fsdp", 1), ("hsdp", 2)):
        assert cheapest(rows(mode, replicas=replicas)).policy == "deferred"


def test_where_the_window_does_not_fit_shards_stay_shards():
    assert cheapest(rows("fsdp", limit=GIGA)).policy == "immediate"
    assert cheapest(rows("hsdp", limit=GIGA, replicas=2)).policy == "hierarchical"


def test_the_table_holds_the_bytes_of_ring_collectives():
    deferred, immediate = rows("fsdp")
    assert deferred.within == pytest.approx(2 * GIGA * 7 / 8)
    assert immediate.within == pytest.approx(8 * 3 * GIGA * 7 / 8)
    deferred, immediate = rows("ddp")
    assert deferred.across == pytest.approx(2 * GIGA * 7 / 8)
    assert immediate.across == pytest.approx(8 * deferred.across)


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_micro_batches_of_a_layout_do_not_depend_on_the_ranks(size, micro, ranks, seed, packed):
    lengths = np.random.default_rng(seed).integers(1, 40, size).astype(np.int64)
    alone = Leaves(micro=micro).cut(lengths, Layout(packed=packed))
    spread = Leaves(micro=micro).cut(lengths, Layout(world_size=ranks, packed=packed))
    spread.check(Layout(world_size=ranks, packed=packed))
    for plan in (alone, spread):
        assert max(len(slot) for slots in plan.ranks for slot in slots) <= micro
    flat = [slot.tolist() for slots in spread.ranks for slot in slots]
    assert flat == [slot.tolist() for slot in alone.ranks[0]]
    assert sum(spread.padded_lengths, ()) == alone.padded_lengths[0]


def test_fixed_micro_batches_are_not_cut_smaller():
    lengths = np.ones(4, dtype=np.int64)
    leaves = Leaves(micro=2)
    with pytest.raises(DoesNotFitError, match=r"lower accum\.micro"):
        leaves.smaller(leaves.cut(lengths, Layout()))


def test_a_sum_that_integers_cannot_hold_is_not_finite():
    module = nn.Linear(2, 1)
    model = Ordered(module, bind(module), list(module.parameters()), World(), most=4)
    for scale, is_finite in ((1.0, True), (1e9, False), (float("nan"), False)):
        model.gather()
        with model.reducing(across=True, is_last=True):
            (model.call({"input": torch.ones(1, 2)}).sum() * scale).backward()
        model.reduce(model.used())
        assert bool(torch.isfinite(model.gradient_norm())) is is_finite


def test_a_process_alone_starts_its_own_ranks():
    assert membership({}) is None
    assert membership({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert membership({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_and_srun_say_which_rank_a_process_is():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    torchrun = membership(dict(zip(names, "5824", strict=True)) | MEETING)
    assert (torchrun.rank, torchrun.size) == (5, 8)
    assert (torchrun.local_rank, torchrun.local_size) == (2, 4)
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
    srun = membership(dict(zip(names, ("5", "8", "1", "4(x2)"), strict=True)) | MEETING)
    assert (srun.rank, srun.size, srun.local_rank, srun.local_size) == (5, 8, 1, 4)


def test_a_rank_that_cannot_find_the_others_says_what_is_missing():
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        membership({"RANK": "1", "WORLD_SIZE": "2"})


def test_a_board_is_read_by_another_as_it_was_written(tmp_path: Path):
    mine, theirs = Board(tmp_path / "board"), Board(tmp_path / "board")
    assert theirs.read() == Place()
    assert str(theirs.read()) == "the start"
    mine.write(Place(pid=7, step=3, phase="compute", micro_batch=2))
    place = theirs.read()
    assert str(place) == "step 3 (compute, micro-batch 2)"
    assert place.pid == 7
    assert place.since > 0
    mine.close()
    theirs.close()
