"""Sizes of `accum=fixed`: any two give the third, and only contradictions are refused."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.batch import FixedSizes, resolve_fixed
from trainer.core.errors import ConfigError
from trainer.plan.cut import Layout
from trainer.plan.cuts import Fixed

SIZES = st.integers(1, 600)
RANKS = st.integers(1, 9)


@given(SIZES, SIZES, RANKS)
def test_micro_and_steps_give_the_global_batch(micro, steps, world_size):
    sizes = resolve_fixed(None, micro, steps, world_size)
    assert sizes.global_size == micro * steps * world_size
    assert resolve_fixed(sizes.global_size, micro, steps, world_size) == sizes


@given(SIZES, SIZES, RANKS)
def test_global_and_micro_give_the_steps_of_the_busiest_rank(global_size, micro, world_size):
    sizes = resolve_fixed(global_size, micro, None, world_size)
    plan = Fixed(micro=micro).cut(np.ones(global_size, np.int64), Layout(world_size=world_size))
    assert (sizes.global_size, sizes.micro, sizes.steps) == (global_size, micro, plan.accum_steps)


@given(SIZES, st.integers(1, 60), RANKS)
def test_global_and_steps_give_the_largest_micro_batch(global_size, steps, world_size):
    share = -(-global_size // world_size)
    if steps > share:
        with pytest.raises(ConfigError, match=f"accum.steps={share}, or batch.global="):
            resolve_fixed(global_size, None, steps, world_size)
        return
    sizes = resolve_fixed(global_size, None, steps, world_size)
    plan = Fixed(steps=steps).cut(np.ones(global_size, np.int64), Layout(world_size=world_size))
    assert sizes.steps == plan.accum_steps == steps
    assert sizes.micro == max(len(ids) for slots in plan.ranks for ids in slots)


@given(SIZES, st.integers(1, 60), st.integers(1, 60), RANKS)
def test_a_contradiction_names_sizes_that_agree(global_size, micro, steps, world_size):
    try:
        sizes = resolve_fixed(global_size, micro, steps, world_size)
    except ConfigError as error:
        typed = {"batch.global": global_size, "accum.micro": micro, "accum.steps": steps}
        fixes = re.findall(r"([a-z.]+)=(\d+)", str(error).partition("agree:")[2])
        assert len(fixes) >= 2
        for key, value in fixes:
            fixed = {**typed, key: int(value)}
            resolve_fixed(*fixed.values(), world_size)
            if key != "batch.global":
                assert abs(int(value) - typed[key]) >= 1
    else:
        assert sizes == resolve_fixed(global_size, micro, None, world_size)


def test_the_nearest_global_batch_is_the_nearest():
    with pytest.raises(ConfigError) as caught:
        resolve_fixed(10, 8, 3, 1)
    assert str(caught.value) == (
        "accum.steps: 3 micro-batches of 8 samples on 1 rank hold 24 samples, not "
        "batch.global=10. The nearest sizes that agree: batch.global=17, or batch.global=24 "
        "(no short micro-batch), or accum.steps=2, or accum.micro=4"
    )
    with pytest.raises(ConfigError, match=r"batch\.global=24, or accum\.steps=64"):
        resolve_fixed(509, 8, 3, 1)


def test_a_ragged_last_micro_batch_is_legal():
    assert resolve_fixed(509, 7, None, 1) == FixedSizes(global_size=509, micro=7, steps=73)


def test_without_micro_and_steps_each_rank_computes_its_share_in_one_piece():
    assert resolve_fixed(9, None, None, 2) == FixedSizes(global_size=9, micro=5, steps=1)


def test_a_global_batch_smaller_than_the_ranks_is_legal():
    assert resolve_fixed(3, 4, None, 8) == FixedSizes(global_size=3, micro=4, steps=1)


def test_sizes_below_one_are_refused_all_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve_fixed(0, -3, 1, 1)
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["batch.global", "accum.micro"]


def test_without_a_global_batch_both_others_are_needed():
    with pytest.raises(ConfigError, match=r"batch\.global: needed"):
        resolve_fixed(None, 4, None, 1)


def test_batch_arithmetic_imports_neither_numpy_nor_torch():
    code = "import sys, trainer.config.batch as _; print(*{'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
