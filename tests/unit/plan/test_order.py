"""The order of samples is a pure function, visits every sample once, and counts its steps."""

import tracemalloc
from dataclasses import dataclass

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


def walk(order, num_steps, cursor=None):
    cursor = cursor or order.start
    batches = []
    for _ in range(num_steps):
        batches.append(order.next(cursor))
        cursor = batches[-1].after
    return batches


def ids_of(batches):
    return [tuple(batch.ids.tolist()) for batch in batches]


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


WAVES = st.builds(
    Waves,
    global_batch=st.just(1),
    waves=st.lists(st.integers(1, 40), min_size=2, max_size=5).map(tuple),
    every=st.integers(1, 30),
    by=st.sampled_from(["step", "samples", "tokens", "epochs"]),
)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=50).map(np.array),
    seed=st.integers(0, 2**40),
    sizes=st.builds(ConstantSize, global_batch=st.integers(1, 300)) | WAVES,
    unit=st.sampled_from(["samples", "tokens"]),
    drops=st.booleans(),
)
def test_an_epoch_visits_every_sample_once_and_a_step_ends_with_the_one_that_fills_it(
    lengths, seed, sizes, unit, drops
):
    counted = lengths if unit == "tokens" else np.ones(len(lengths))
    tail = "drop" if drops and counted.sum() >= sizes.largest else "keep"
    order, fresh = (Order(len(lengths), seed, sizes, unit, tail, lengths) for _ in range(2))
    batches = walk(order, order.num_steps(3))
    assert max(len(batch.ids) for batch in batches) <= order.most_samples
    num_samples = num_tokens = 0
    for batch in batches:
        total, size = counted[batch.ids].sum(), sizes.size(order.position(batch.before))
        assert batch.size == size
        assert batch.is_tail == (total < size)
        assert total - counted[batch.ids[-1]] < size
        assert not (batch.is_tail and tail == "drop")
        num_samples += len(batch.ids)
        num_tokens += lengths[batch.ids].sum() if sizes.reads_tokens else 0
        assert (batch.after.samples, batch.after.tokens) == (num_samples, num_tokens)
    assert batches[-1].after == Cursor(len(batches), 3, 0, num_samples, num_tokens)
    for epoch in range(3):
        ids = np.concatenate([batch.ids for batch in batches if batch.epoch == epoch])
        assert len(np.unique(ids)) == len(ids)
        left = counted.sum() - counted[ids].sum()
        assert left == 0 or (tail == "drop" and left < sizes.largest)
    assert order.num_steps(1) == sum(batch.epoch == 0 for batch in batches)
    if module.DRAWN_WHOLE:  # else a number of steps of tokens is expected and not counted
        assert order.steps_per_epoch == order.num_steps(1)
    keeping = Order(len(lengths), seed, sizes, unit, lengths=lengths)
    if sizes.is_constant:  # dropping takes away short steps, and no other
        kept = [batch for batch in walk(keeping, keeping.num_steps(3)) if not batch.is_tail]
        assert ids_of(kept) == ids_of(batch for batch in batches if not batch.is_tail)
    # From anywhere a run goes on without the steps before; with steps of another size, too.
    middle = len(batches) // 2
    assert [*fresh.walk(len(batches))] == [*(b.before for b in batches), batches[-1].after]
    resumed = walk(fresh, len(batches) - middle, batches[middle].before)
    assert ids_of(resumed) == ids_of(batches[middle:])
    assert resumed[-1].after == batches[-1].after
    other = Order(len(lengths), seed, 1, unit, lengths=lengths).next(batches[middle].before)
    assert other.ids[0] == batches[middle].ids[0]


def test_epochs_and_seeds_have_permutations_of_their_own():
    def first_epochs(seed):
        return ids_of(walk(Order(50, seed, 50), 2))

    assert len({*first_epochs(0), *first_epochs(1), *first_epochs(2**32)}) == 6


# Version 2: beyond what is drawn whole

MANY = DRAWN_WHOLE + 3
RAGGED = 1 + np.arange(MANY) * 7919 % 60


def test_a_bijection_keeps_every_promise_of_the_order(monkeypatch):
    monkeypatch.setattr(module, "DRAWN_WHOLE", 0)
    test_an_epoch_visits_every_sample_once_and_a_step_ends_with_the_one_that_fills_it()


def test_an_epoch_is_drawn_whole_up_to_a_size_and_beyond_it_is_a_bijection():
    at = Cursor(1, 1, 0, MANY)
    found = Order(MANY, 3, MANY).next(at).ids.tolist()
    assert sorted(found) == list(range(MANY))
    assert found != drawn_whole(MANY, "3\x1f1").tolist()
    few = Cursor(1, 1, 0, 900)
    assert Order(900, 3, 900).next(few).ids.tolist() == drawn_whole(900, "3\x1f1").tolist()


@pytest.mark.parametrize("unit", ["samples", "tokens"])
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
