"""Sizes of `accum=fixed`: any two give the third, and only contradictions are refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.amounts import cadence_steps
from trainer.config.rules import complete_sizes, num_replicas
from trainer.core.errors import ConfigError

SIZES, RANKS = st.integers(1, 600), st.integers(1, 9)


@given(SIZES, SIZES, RANKS)
def test_micro_and_steps_give_the_global_batch(micro, steps, world_size):
    global_batch = complete_sizes(None, micro, steps, world_size)
    assert global_batch == micro * steps * world_size
    assert complete_sizes(global_batch, micro, steps, world_size) == global_batch


@given(SIZES, st.none() | st.integers(1, 60), st.integers(1, 60), RANKS)
def test_a_contradiction_names_sizes_that_agree(global_batch, micro, steps, world_size):
    share = -(-global_batch // world_size)
    agree = steps <= share if micro is None else steps == -(-share // micro)
    if agree:
        assert complete_sizes(global_batch, micro, steps, world_size) == global_batch
        return
    with pytest.raises(ConfigError) as caught:
        complete_sizes(global_batch, micro, steps, world_size)
    typed = {"batch.global": global_batch, "accum.micro": micro, "accum.steps": steps}
    fixes = re.findall(r"([a-z.]+)=(\d+)", str(caught.value).partition("agree:")[2])
    assert len(fixes) >= 2
    assert micro is not None or fixes[1] == ("accum.steps", str(share))
    for key, value in fixes:
        fixed = {**typed, key: int(value)}
        complete_sizes(*fixed.values(), world_size)
        assert key == "batch.global" or abs(int(value) - typed[key]) >= 1


def test_the_nearest_global_batch_is_the_nearest():
    with pytest.raises(ConfigError, match=r"agree: batch\.global=17, or accum\.steps=2, or acc"):
        complete_sizes(10, 8, 3, 1)
    with pytest.raises(ConfigError, match=r"batch\.global=24, or accum\.steps=64"):
        complete_sizes(509, 8, 3, 1)
    with pytest.raises(ConfigError, match=r"batch\.global: needed"):
        complete_sizes(None, 4, None, 1)


@given(st.integers(1, 64), st.sampled_from(["auto", 1, 2, 3, 4]), st.sampled_from(["auto", 1, 2]))
def test_copies_of_the_model_are_the_ranks_or_the_nearest_are_named(world_size, shard, replicate):
    try:
        assert world_size % num_replicas(world_size, 1, shard, replicate) == 0
    except ConfigError as error:
        part, copies = re.findall(r"=(\d+)", str(error))[-2:]
        assert num_replicas(world_size, 1, int(part), int(copies)) == int(copies)


def test_the_smallest_share_of_a_run_is_every_step():
    assert cadence_steps(1e-9, 32) == cadence_steps(1 / 32, 32) == 1
    assert cadence_steps(0.1, 30) == 3
