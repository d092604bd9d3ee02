"""Padded and packed partitions: what they may never do, and what nothing can do better."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.plan_support import costs_of, efficiency, tokens_of
from trainer.plan.cut import Cost, Layout
from trainer.plan.cuts import Budget
from trainer.plan.packing import pack, pack_rows
from trainer.plan.partition import cut_sorted, ladder, pad_lengths, partition

COSTS = st.builds(Cost, fixed=st.floats(0.0, 500.0), quadratic=st.sampled_from([0.0, 0.001, 0.02]))
ROUNDING = 1e-9


@st.composite
def batches(draw, most=60, longest=120):
    """Lengths as they come: any, all alike, few distinct, many short with a long tail."""
    kinds = [
        st.integers(0, longest),
        st.just(draw(st.integers(1, longest))),
        st.sampled_from([1, 7, longest]),
        st.one_of(st.integers(1, 9), st.integers(1, longest)),
    ]
    values = draw(st.sampled_from(kinds))
    return np.array(draw(st.lists(values, min_size=1, max_size=most)), dtype=np.int64)


def descending(lengths):
    return np.sort(np.maximum(lengths, 1))[::-1]


def cost_of_cuts(lengths, starts, cost):
    bounds = [*map(int, starts), len(lengths)]
    return sum(tokens_of(cost, end - begin, int(lengths[begin])) for begin, end in pairwise(bounds))


@given(batches(most=120), st.integers(120, 5000), COSTS, st.sampled_from([3, 1000]))
def test_cuts_are_optimal_by_the_plain_recursion(lengths, cap, cost, max_micro):
    lengths = descending(lengths)
    prices = cost.per_sample(lengths)
    value = np.zeros(len(lengths) + 1)
    for i in range(len(lengths) - 1, -1, -1):
        most = min(cap // lengths[i], max_micro, len(lengths) - i)
        sizes = np.arange(1, most + 1)
        value[i] = (cost.fixed + sizes * prices[i] + value[i + 1 : i + 1 + most]).min()
    ours = cost_of_cuts(lengths, cut_sorted(lengths, cap, cost, max_micro), cost)
    assert ours == pytest.approx(value[0], rel=ROUNDING)


def partitions(items):
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for at, block in enumerate(rest):
            yield [*rest[:at], [items[0], *block], *rest[at + 1 :]]


@given(
    st.lists(st.integers(1, 30), min_size=8, max_size=8),
    st.sampled_from([1, 2, 4]),
    st.integers(120, 400),
    st.floats(0.0, 100.0),
)
def test_cuts_of_groups_are_as_cheap_as_the_best_of_all_partitions(lengths, size, cap, fixed):
    lengths, cost = np.array(lengths), Cost(fixed=fixed)
    plan = Budget(max_tokens=cap).cut(lengths, Layout(group_size=size, cost=cost))
    cheapest = np.inf
    for blocks in partitions(lengths.reshape(-1, size).max(axis=1).tolist()):
        if all(size * len(block) * max(block) <= cap for block in blocks):
            price = sum(tokens_of(cost, size * len(block), max(block)) for block in blocks)
            cheapest = min(cheapest, price)
    assert sum(costs_of(plan, cost)[0]) == pytest.approx(cheapest, rel=ROUNDING)


@given(st.integers(1, 400), st.integers(1, 50), st.integers(50, 2000))
def test_samples_of_one_length_are_cut_evenly_into_the_fewest(num_samples, length, cap):
    starts = cut_sorted(np.full(num_samples, length), cap, Cost(), num_samples)
    sizes = np.diff([*starts, num_samples])
    assert len(sizes) == -(-num_samples // (cap // length))
    assert sizes.max() - sizes.min() <= 1


def test_ranks_in_lockstep_wait_little_for_each_other_on_lognormal_lengths():
    layout = Layout(world_size=64, lockstep=True, cost=Cost(quadratic=0.00094))
    drawn = 300 * np.random.default_rng(0).lognormal(0.0, 1.0, (3, 64 * 64))
    batches_of_lengths = np.clip(np.ceil(drawn), 1, 2048).astype(np.int64)
    plans = [partition(lengths, layout, 8192) for lengths in batches_of_lengths]
    for plan in plans:
        plan.check(layout)
        assert plan.max_positions <= 8192
    assert np.mean([efficiency(plan, layout) for plan in plans]) >= 0.87


def test_ranks_without_collectives_may_hold_nothing():
    lengths = np.array([5, 9])
    plan = partition(lengths, Layout(world_size=4), cap=100)
    assert [len(slots) for slots in plan.ranks] == [1, 1, 0, 0]
    in_lockstep = partition(lengths, Layout(world_size=4, lockstep=True), cap=100)
    assert [[len(ids) for ids in slots] for slots in in_lockstep.ranks] == [[1], [1], [0], [0]]
    assert in_lockstep.padded_lengths == ((9,), (5,), (0,), (0,))


@given(batches(most=40), st.integers(1, 3), COSTS)
def test_a_ladder_wastes_the_least_that_few_lengths_can(lengths, max_shapes, cost):
    lengths = descending(lengths)
    shapes, tops = ladder(lengths, max_shapes, cost), np.unique(lengths)

    def waste(chosen):
        steps = np.array(sorted(chosen))
        return cost.per_sample(steps[np.searchsorted(steps, lengths)]).sum()

    count = min(max_shapes, len(tops))
    candidates = ({*c, tops[-1]} for c in combinations(tops[:-1], count - 1))
    assert waste(shapes) == pytest.approx(min(map(waste, candidates)), rel=ROUNDING)
    assert len(shapes) <= max_shapes


def test_shapes_of_the_layout_hold_for_every_batch():
    padded = pad_lengths(np.array([0, 16, 17, 65]), Layout(shapes=(16, 64), pad_multiple=8))
    assert padded.tolist() == [16, 16, 64, 72]


@given(batches(), st.integers(120, 700), st.sampled_from([1, 4]))
def test_packed_rows_are_few_and_more_than_half_full(lengths, cap, multiple_of):
    lengths = descending(lengths)
    rows = pack_rows(lengths, Cost().per_sample(lengths), cap, len(lengths), multiple_of)
    fewest = 2 * int(lengths.sum()) // cap + 1
    assert len(rows) <= -(-fewest // multiple_of) * multiple_of
    assert len(rows) % multiple_of == 0
    assert sum(len(row) == 0 for row in rows) == max(0, len(rows) - len(lengths))


def test_packed_rows_are_balanced_where_their_number_allows_it():
    lengths = descending(np.random.default_rng(0).integers(1, 100, 400))
    rows = pack_rows(lengths, lengths.astype(float), 1100, 400)
    totals = [int(lengths[row].sum()) for row in rows]
    assert len(rows) == -(-int(lengths.sum()) // 1100)
    assert max(totals) - min(totals) <= 10


def test_packing_falls_back_to_best_fit_where_balancing_finds_no_room():
    # By cost alone the rows become 6 + 3 and 4 + 4, and the last 3 has room in neither.
    lengths = np.array([6, 4, 4, 3, 3])
    rows = pack_rows(lengths, lengths.astype(float), 10, 5)
    assert sorted(int(lengths[row].sum()) for row in rows) == [10, 10]


def test_lockstep_packing_splits_rows_to_fill_a_count():
    layout = Layout(world_size=5, lockstep=True, packed=True)
    plan = pack(np.array([7, 6, 5, 5, 4, 3]), layout, cap=10)
    assert all(len(ids) for slots in plan.ranks for ids in slots)
    assert plan.accum_steps == 1
