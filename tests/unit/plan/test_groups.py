"""Groups of samples that must stay together: every cut keeps them whole, and none is cheaper."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.plan_support import costs_of, tokens_of
from trainer.core.errors import ConfigError
from trainer.plan.cut import Cost, Layout, Plan
from trainer.plan.cuts import Auto, Budget, Fixed, SampleTooLongError


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
    layout = Layout(group_size=size, cost=cost)
    plan = Budget(max_tokens=cap).cut(lengths, layout)
    found = sum(costs_of(plan, cost)[0])
    tops = lengths.reshape(-1, size).max(axis=1).tolist()

    def price(blocks):
        return sum(tokens_of(cost, size * len(block), max(block)) for block in blocks)

    def fits(blocks):
        return all(size * len(block) * max(block) <= cap for block in blocks)

    assert found == pytest.approx(min(price(b) for b in partitions(tops) if fits(b)), rel=1e-9)


def test_a_group_is_not_divided_for_a_bound_on_samples():
    layout = Layout(group_size=4)
    plan = Budget(max_tokens=100, micro=6).cut(np.full(10, 5), layout)
    assert max(len(ids) for slots in plan.ranks for ids in slots) == 4
    with pytest.raises(ConfigError, match=r"accum\.micro=4"):
        Budget(max_tokens=100, micro=3).cut(np.full(10, 5), layout)
    with pytest.raises(ConfigError, match=r"accum\.micro=8"):
        Fixed(micro=7).cut(np.full(10, 5), layout)


def test_a_cap_that_holds_no_group_names_one_that_does():
    lengths, layout = np.array([3, 5, 9, 2]), Layout(group_size=2)
    with pytest.raises(ConfigError, match=r"accum\.max_tokens=18"):
        Budget(max_tokens=17).cut(lengths, layout)
    with pytest.raises(SampleTooLongError) as caught:
        Auto().tuned(17, Cost()).cut(lengths, layout)
    assert (caught.value.position, caught.value.length) == (2, 9)


def test_a_plan_that_divides_or_shuffles_a_group_is_refused():
    layout = Layout(group_size=2)
    lengths = np.full(3, 4)
    for ids, is_whole in (
        ([[0, 1, 2]], True),
        ([[0, 1], [2]], True),
        ([[1, 0, 2]], False),
        ([[2, 0, 1]], False),
        ([[0], [1, 2]], False),
    ):
        slots = tuple(np.array(part) for part in ids)
        plan = Plan(ranks=(slots,), lengths=lengths, padded_lengths=((4,) * len(slots),))
        with nullcontext() if is_whole else pytest.raises(ConfigError, match="must stay together"):
            plan.check(layout)
