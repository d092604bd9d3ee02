"""The order of samples is a pure function, visits every sample once, and counts its steps."""

import tracemalloc
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import order as module
from trainer.plan.batch_size import BatchSize, ConstantSize
from trainer.plan.lengths import Lengths
from trainer.plan.order import Cursor
from trainer.plan.permutation import DRAWN_WHOLE, drawn_whole


def Order(num_samples, seed, size, *more, **settings):  # noqa: N802 - stands for the class
    """Order with steps of one size, or of those that are given."""
    sizes = size if isinstance(size, BatchSize) else ConstantSize(global_batch=size)
    return module.Order(num_samples, seed, sizes, *more, **settings)


sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)
UNITS = ("samples", "tokens")
ragged = st.lists(st.integers(1, 30), min_size=1, max_size=50).map(np.array)


def walk(order, num_steps, cursor=None):
    cursor = cursor or order.start
    batches = []
    for _ in range(num_steps):
        batches.append(order.next(cursor))
        cursor = batches[-1].after
    return batches


def ids_of(batches):
    return [tuple(batch.ids.tolist()) for batch in batches]


RUNS = {"lengths": ragged, "seed": seeds, "unit": st.sampled_from(UNITS)}


@given(**RUNS, target=st.integers(1, 300), epochs=st.integers(1, 3))
def test_an_epoch_visits_every_sample_once_and_a_step_ends_with_the_one_that_fills_it(
    lengths, seed, unit, target, epochs
):
    order = Order(len(lengths), seed, target, unit, lengths=lengths)
    counted = lengths if unit == "tokens" else np.ones(len(lengths))
    batches = walk(order, order.num_steps(epochs))
    for batch in batches:
        total = counted[batch.ids].sum()
        assert batch.is_tail == (total < target)
        assert total - counted[batch.ids[-1]] < target
    for batch, following in pairwise(batches):
        assert not batch.is_tail or following.epoch == batch.epoch + 1
    for epoch in range(epochs):
        ids = [i for batch in batches if batch.epoch == epoch for i in batch.ids.tolist()]
        assert sorted(ids) == list(range(len(lengths)))
    assert batches[-1].after == Cursor(len(batches), epochs, 0, epochs * len(lengths))
    assert max(len(batch.ids) for batch in batches) <= order.most_samples


@given(**RUNS, data=st.data(), epochs=st.integers(1, 3))
def test_dropping_drops_exactly_what_does_not_reach_the_target(lengths, seed, unit, data, epochs):
    target = data.draw(st.integers(1, len(lengths) if unit == "samples" else int(lengths.sum())))
    keeping = Order(len(lengths), seed, target, unit, lengths=lengths)
    dropped = Order(len(lengths), seed, target, unit, tail="drop", lengths=lengths)
    full = [batch for batch in walk(keeping, keeping.num_steps(epochs)) if not batch.is_tail]
    assert dropped.num_steps(epochs) == len(full)
    walked = walk(dropped, len(full))
    assert ids_of(walked) == ids_of(full)
    if unit == "samples":
        assert dropped.steps_per_epoch == len(lengths) // target
        assert walked[-1].after == Cursor(len(full), epochs, 0, len(full) * target)


@given(
    lengths=ragged,
    seed=seeds,
    size=st.integers(1, 400),
    tail=st.sampled_from(["keep", "drop"]),
    unit=st.sampled_from(["samples", "tokens"]),
)
def test_the_position_after_a_step_does_not_depend_on_the_way_there(
    lengths, seed, size, tail, unit
):
    total = len(lengths) if unit == "samples" else int(lengths.sum())
    size = min(size, total) if tail == "drop" else size

    def fresh():
        return Order(len(lengths), seed, size, unit, tail, lengths)

    walked = walk(fresh(), 7)
    resumed = walk(fresh(), 4, cursor=walked[2].after)
    assert ids_of(resumed) == ids_of(walked[3:])
    assert [batch.after for batch in resumed] == [batch.after for batch in walked[3:]]


@given(n=sizes, seed=seeds, size=st.integers(1, 80), other=st.integers(1, 80))
def test_another_global_size_goes_on_from_the_same_sample(n, seed, size, other):
    first = walk(Order(n, seed, size), 2)
    cursor, visited = first[-1].after, [i for ids in ids_of(first) for i in ids]
    order = Order(n, seed, other)
    for _ in range(order.num_steps(1)):
        batch = order.next(cursor)
        cursor = batch.after
        visited += batch.ids.tolist()
    whole_epochs = len(visited) // n
    for epoch in range(whole_epochs):
        assert sorted(visited[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_have_permutations_of_their_own():
    def first_epochs(seed):
        return ids_of(walk(Order(50, seed, 50), 2))

    assert len({*first_epochs(0), *first_epochs(1), *first_epochs(2**32)}) == 6


# Version 2: beyond what is drawn whole

MANY = DRAWN_WHOLE + 3
RAGGED = 1 + np.arange(MANY) * 7919 % 60


@pytest.fixture
def without_drawing(monkeypatch):
    """Order even a few samples as many are."""
    monkeypatch.setattr(module, "DRAWN_WHOLE", 0)


@pytest.mark.usefixtures("without_drawing")
@pytest.mark.parametrize(
    "check",
    [
        test_an_epoch_visits_every_sample_once_and_a_step_ends_with_the_one_that_fills_it,
        test_dropping_drops_exactly_what_does_not_reach_the_target,
        test_the_position_after_a_step_does_not_depend_on_the_way_there,
        test_another_global_size_goes_on_from_the_same_sample,
    ],
)
def test_a_bijection_keeps_every_promise_of_the_order(check):
    check()


def test_an_epoch_is_drawn_whole_up_to_a_size_and_beyond_it_is_a_bijection():
    at = Cursor(1, 1, 0, MANY)
    found = Order(MANY, 3, MANY).next(at).ids.tolist()
    assert sorted(found) == list(range(MANY))
    assert found != drawn_whole(MANY, "3\x1f1").tolist()
    few = Cursor(1, 1, 0, 900)
    assert Order(900, 3, 900).next(few).ids.tolist() == drawn_whole(900, "3\x1f1").tolist()


@pytest.mark.parametrize("unit", UNITS)
def test_a_step_of_a_billion_samples_takes_its_own_memory_wherever_it_is(unit):
    many = 10**9
    lengths = Lengths(np.broadcast_to(np.int64(100), many))
    tracemalloc.start()
    order = Order(many, 0, 512 if unit == "samples" else 51_200, unit, lengths=lengths)
    late = Cursor(10**6, 0, 512 * 10**6, 512 * 10**6)
    batch = order.next(late)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(batch.ids), batch.after.offset) == (512, late.offset + 512)
    assert batch.ids.tolist() == order._ids(0, late.offset, late.offset + 512).tolist()
    assert order.steps_per_epoch == order.num_steps(1) == many // 512
    assert peak < 2**20


def test_steps_of_tokens_are_counted_in_chunks_and_expected_without():
    order = Order(MANY, 0, 512, "tokens", lengths=RAGGED)
    cursor, count = order.start, 0
    while cursor.epoch == 0:
        batch = order.next(cursor)
        cursor, count = batch.after, count + 1
        assert batch.is_tail or RAGGED[batch.ids].sum() >= 512
    assert order.num_steps(1) == count
    assert order.steps_per_epoch == pytest.approx(count, rel=1e-3)
    assert Order(MANY, 0, 512, "tokens", "drop", RAGGED).num_steps(1) == count - 1


@dataclass(frozen=True, kw_only=True)
class Waves(BatchSize):
    """Sizes that come and go, with what is behind them."""

    reads_tokens = True

    waves: tuple[int, ...]
    every: int = 1
    by: str = "step"

    @property
    def largest(self):
        return max(self.waves)

    def size(self, at):
        return self.waves[int(getattr(at, self.by) // self.every) % len(self.waves)]


WAVES = {
    "waves": st.lists(st.integers(1, 40), min_size=2, max_size=5).map(tuple),
    "every": st.integers(1, 30),
    "by": st.sampled_from(["step", "samples", "tokens", "epochs"]),
}


@given(**RUNS, sizes=st.builds(Waves, global_batch=st.just(1), **WAVES), drops=st.booleans())
def test_steps_of_many_sizes_are_counted_as_they_are_taken(lengths, seed, unit, sizes, drops):
    counted = lengths if unit == "tokens" else np.ones(len(lengths))
    tail = "drop" if drops and counted.sum() >= sizes.largest else "keep"
    order = Order(len(lengths), seed, sizes, unit, tail, lengths)
    batches = walk(order, order.num_steps(3))
    assert [batch.epoch for batch in batches].count(0) == order.steps_per_epoch
    assert {batch.epoch for batch in batches} == {0, 1, 2}
    assert batches[-1].after.epoch == 3
    fresh, ends = Order(len(lengths), seed, sizes, unit, tail, lengths), [0]
    assert [*fresh.walk(len(batches))] == [*(b.before for b in batches), batches[-1].after]
    for batch in batches:
        total, size = counted[batch.ids].sum(), sizes.size(order.position(batch.before))
        assert batch.size == size
        assert batch.is_tail == (total < size)
        assert total - counted[batch.ids[-1]] < size
        assert not (batch.is_tail and tail == "drop")
        ends.append(ends[-1] + lengths[batch.ids].sum())
    assert [batch.after.tokens for batch in batches] == ends[1:]
    middle = len(batches) // 2  # from where a run may go on without those before
    assert ids_of(walk(fresh, 3, batches[middle].before))[0] == ids_of(batches)[middle]
