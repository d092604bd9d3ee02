"""Many ranks are dealt and cut at once as they are one by one, sample for sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import partition as module
from trainer.plan.cut import Cost, Layout
from trainer.plan.partition import MANY_RANKS, deal_by_cost, deal_in_blocks, partition

COSTS = st.builds(
    Cost,
    fixed=st.sampled_from([0.25, 1.0, 33.0, 500.0, 20000.0]),
    quadratic=st.sampled_from([0.0, 0.001, 0.03]),
)
lengths_of = st.one_of(
    st.lists(st.integers(1, 2000), min_size=1, max_size=400),
    st.lists(st.sampled_from([8, 16, 24, 512]), min_size=1, max_size=400),
    st.integers(1, 300).map(lambda count: [64] * count),
).map(np.array)


def listed(plan):
    return [[slot.tolist() for slot in slots] for slots in plan.ranks], plan.padded_lengths


@given(lengths_of, COSTS, st.integers(2, 90), st.integers(2000, 20000), st.sampled_from([None, 3]))
def test_many_ranks_are_cut_at_once_as_one_by_one(lengths, cost, ranks, cap, micro):
    layout = Layout(world_size=ranks, cost=cost, pad_multiple=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MANY_RANKS", 1)
        at_once = partition(lengths, layout, cap, micro)
        patch.setattr(module, "MANY_RANKS", 10**9)
        one_by_one = partition(lengths, layout, cap, micro)
    assert listed(at_once) == listed(one_by_one)


@given(st.lists(st.integers(1, 60), max_size=200), st.integers(1, 70))
def test_samples_are_dealt_in_blocks_as_one_by_one(lengths, ranks):
    costs = np.sort(np.array(lengths, dtype=float))[::-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MANY_RANKS", 10**9)
        one_by_one = deal_by_cost(costs, ranks)
    assert list(map(list, deal_in_blocks(costs, ranks))) == list(map(list, one_by_one))


def test_1024_ranks_have_the_plan_of_one_by_one(monkeypatch):
    numbers = np.random.default_rng(0)
    lengths = np.clip(np.exp(numbers.normal(5.5, 0.9, 8192)), 8, 2048).astype(np.int64)
    layout = Layout(world_size=1024, pad_multiple=8, longest=2048)
    at_once = partition(lengths, layout, 16384)
    at_once.check(layout)
    monkeypatch.setattr(module, "MANY_RANKS", MANY_RANKS * 10**6)
    assert listed(at_once) == listed(partition(lengths, layout, 16384))
