"""The three cuts: what they keep, what they refuse, and how they shrink when memory runs out."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.errors import ConfigError
from trainer.plan.cut import Cost, Layout, Plan
from trainer.plan.cuts import Auto, Budget, Fixed, SampleTooLongError

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=50).map(np.array)
LAYOUTS = st.builds(
    Layout,
    world_size=st.sampled_from([1, 2, 5]),
    lockstep=st.booleans(),
    packed=st.booleans(),
    pad_multiple=st.sampled_from([1, 8]),
)
GROUPS = st.sampled_from([1, 2, 3, 8])


def cuts_of(size):
    """Any cut that holds a group of so many samples."""
    caps = st.integers(96 * size, 400 * size)
    return st.one_of(
        st.just(Fixed()),
        st.integers(1, 9).map(lambda count: Fixed(micro=count * size)),
        st.builds(Fixed, steps=st.integers(1, 9)),
        st.builds(Budget, max_tokens=caps, micro=st.sampled_from([None, 4 * size])),
        caps.map(lambda cap: Auto().tuned(cap, Cost(fixed=20.0))),
    )


def samples_of(plan):
    return [[ids.tolist() for ids in slots] for slots in plan.ranks]


@given(LENGTHS, LAYOUTS, st.integers(1, 12))
def test_fixed_keeps_sample_order_and_counts(lengths, layout, micro):
    plan = Fixed(micro=micro).cut(lengths, layout)
    order = [position for slots in samples_of(plan) for ids in slots for position in ids]
    assert order == list(range(len(lengths)))
    shares = [sum(map(len, slots)) for slots in samples_of(plan)]
    assert max(shares) - min(shares) <= 1
    for slots in samples_of(plan):
        sizes = [len(ids) for ids in slots if ids]
        assert all(size == micro for size in sizes[:-1])
        assert all(size <= micro for size in sizes)
    assert "micro_batch" in Fixed.couplings - Budget.couplings


@pytest.mark.parametrize(
    ("cut", "layout", "ranks", "padded"),
    [
        (Fixed(micro=2), Layout(packed=True), [[[0, 1], [2, 3], [4]]], ((8, 10, 2),)),
        (Fixed(steps=2), Layout(world_size=2), [[[0], [1]], [[2], [3, 4]]], ((5, 3), (9, 2))),
        (
            Fixed(micro=2),
            Layout(world_size=2, lockstep=True, pad_multiple=4),
            [[[0, 1], []], [[2, 3], [4]]],
            ((8, 0), (12, 4)),
        ),
    ],
)
def test_fixed_cuts_by_hand(cut, layout, ranks, padded):
    plan = cut.cut(np.array([5, 3, 9, 1, 2]), layout)
    assert samples_of(plan) == ranks
    assert plan.padded_lengths == padded


def test_auto_cuts_by_the_cost_it_was_tuned_with():
    lengths = np.array([90, 80, 10, 10])
    cheap, dear = (Auto().tuned(1000, Cost(fixed=fixed)) for fixed in (1.0, 10_000.0))
    assert cheap.cut(lengths, Layout()).num_micro_batches > 1
    assert dear.cut(lengths, Layout()).num_micro_batches == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_longer_sample_is_alone_under_a_tuned_cap_that_suits_the_short_ones(packed):
    cut = Auto().tuned(20, Cost(), single_sample_cap=30)
    plan = cut.cut(np.array([5, 30, 7, 6]), Layout(packed=packed))
    assert [ids for ids in samples_of(plan)[0] if 1 in ids] == [[1]]
    assert cut.hard_cap == plan.max_positions == 30
    assert plan.max_shared_positions <= 20
    with pytest.raises(SampleTooLongError, match=r"sample 1 .* 31 tokens") as caught:
        cut.cut(np.array([5, 31]), Layout())
    assert (caught.value.position, caught.value.length, caught.value.cap) == (1, 31, 30)
    with pytest.raises(SampleTooLongError, match=r"sample 2 .* 16 tokens"):
        cut.cut(np.array([3, 5, 16, 2]), Layout(group_size=2))


def largest(plan):
    return max(len(ids) for slots in plan.ranks for ids in slots)


@given(LENGTHS, LAYOUTS, GROUPS, st.data())
def test_cuts_shrink_until_every_micro_batch_is_one_sample_or_group(lengths, layout, size, data):
    layout, cut = dataclasses.replace(layout, group_size=size), data.draw(cuts_of(size))
    plan, attempts = cut.cut(lengths, layout), 0
    plan.check(layout)
    assert plan.packed == layout.packed
    assert 0.0 <= plan.padding < 1.0
    while (smaller := cut.smaller(plan)) is not None:
        again = smaller.cut(lengths, layout)
        again.check(layout)
        if isinstance(cut, Fixed):
            assert largest(again) < largest(plan)
        else:
            assert 10 * again.max_shared_positions <= 7 * plan.max_shared_positions
        cut, plan, attempts = smaller, again, attempts + 1
    assert largest(plan) <= size
    assert attempts <= 20


TWO, LOCKSTEP = Layout(world_size=2), Layout(world_size=2, lockstep=True)


@pytest.mark.parametrize(
    ("ranks", "padded", "layout", "fault"),
    [
        ([[[0, 1], [1, 2]]], [[9, 9]], Layout(), "exactly once"),
        ([[[0, 1]]], [[9]], Layout(), "exactly once"),
        ([[[0, 1, 2]]], [[8]], Layout(), "micro-batch 0 of rank 0"),
        ([[[0, 1, 2]]], [[9]], TWO, "a world size of 1, not 2"),
        ([[[0], [1]], [[2]]], [[9, 9], [9]], LOCKSTEP, "lockstep"),
        ([[[1, 0, 2]]], [[9]], Layout(group_size=2), "must stay together"),
        ([[[0], [1, 2]]], [[9, 9]], Layout(group_size=2), "must stay together"),
    ],
)
def test_a_plan_that_would_change_the_step_or_hang_is_refused(ranks, padded, layout, fault):
    plan = Plan(
        ranks=tuple(tuple(np.array(ids) for ids in slots) for slots in ranks),
        lengths=np.array([5, 9, 7]),
        padded_lengths=tuple(map(tuple, padded)),
    )
    with pytest.raises(ConfigError, match=fault):
        plan.check(layout)


@given(st.data())
def test_all_that_binds_a_cut_holds_together_or_the_error_names_what_would_do(data):
    packed, size = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2, 5]))
    drawn = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=40))
    lengths = np.array(drawn, dtype=np.int64)
    layout = Layout(
        world_size=data.draw(st.integers(1, 4)),
        lockstep=data.draw(st.booleans()),
        pad_multiple=data.draw(st.sampled_from([1, 8])),
        max_shapes=data.draw(st.sampled_from([None, 1, 3])) if packed else None,
        packed=packed,
        group_size=size,
        cost=Cost(fixed=data.draw(st.floats(0.0, 500.0))),
    )
    cap, micro = data.draw(st.integers(1, 500)), data.draw(st.sampled_from([None, 1, 4, 10]))
    try:
        plan = Budget(max_tokens=cap, micro=micro).cut(lengths, layout)
    except ConfigError as error:
        key, nearest = re.search(r"accum\.(micro|max_tokens)=(\d+)$", str(error)).groups()
        asked = {"max_tokens": cap, "micro": micro}
        assert int(nearest) > asked[key]
        asked = asked | {"max_tokens": 10**6} | {key: int(nearest)}
        Budget(**asked).cut(lengths, layout).check(layout)
        return
    plan.check(layout)
    assert plan.max_positions <= cap
    tuned = Auto(micro=micro).tuned(cap, layout.cost).cut(lengths, layout)
    assert samples_of(tuned) == samples_of(plan)
    filled = [(r, s) for r, s in plan.slots() if len(plan.ranks[r][s])]
    assert all(len(plan.ranks[r][s]) <= (micro or len(lengths)) for r, s in filled)
    shapes = {plan.padded_lengths[r][s] for r, s in filled}
    assert len(shapes) <= (layout.max_shapes or len(shapes))
    # A packed row of the whole cap may end anywhere.
    assert all(length % layout.pad_multiple == 0 or length == cap for length in shapes)
    if not (packed or layout.lockstep):
        assert all(list(own) == sorted(own, reverse=True) for own in plan.padded_lengths)
