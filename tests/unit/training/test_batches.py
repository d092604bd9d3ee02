"""The way of the data: from a cursor to micro-batches, the same however it is walked."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.lib.run_toys import Plain, Rows
from trainer.core.errors import DoesNotFitError
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.data.view import DataView
from trainer.objectives.next_token import NextToken
from trainer.plan.batch_size import ConstantSize
from trainer.plan.cut import Cost, Cut, Layout
from trainer.plan.cuts import Auto, Budget, Fixed
from trainer.plan.order import Cursor, Order
from trainer.training.batches import STEPS_AHEAD, Feed, PlannedBatch
from trainer.training.data import Data


def feed(
    cut: Cut | None = None,
    data: Any = None,
    *,
    workers: int = 0,
    world: World | None = None,
    cursor: Cursor | None = None,
    global_batch: int = 8,
) -> Feed:
    data, world = data or Rows(), world or World()
    order = Order(len(data), 0, ConstantSize(global_batch=global_batch))
    loader = Loader(data, num_workers=workers, seed=0)
    lengths = DataView(data).lengths
    samples = Data(order=order, lengths=lengths, loader=loader, total_steps=100)
    how = (cut or Budget(max_tokens=40), Layout(world_size=world.size), world)
    return Feed(samples, NextToken(), *how, seed=0, cursor=cursor or order.start)


def walk(source: Feed, count: int, *, ahead: bool = True) -> list[PlannedBatch]:
    batches = []
    for _ in range(count):
        batches.append(source.next())
        assert source.cursor == batches[-1].samples.after, "not behind what was loaded ahead"
        if ahead:
            source.prefetch()
    source.close()
    return batches


def content(batch: PlannedBatch) -> list[Any]:
    """Everything about a batch that training could see."""
    return [
        (replace(m, fields={}), {name: field.tolist() for name, field in m.fields.items()})
        for m in batch.micro_batches
    ]


@pytest.mark.parametrize(
    ("cut", "data", "workers"), [(Budget(max_tokens=40), Rows, 0), (Fixed(steps=2), Plain, 1)]
)
def test_looking_ahead_and_loading_processes_change_nothing(cut, data, workers):
    plain = walk(feed(cut, data()), 9, ahead=False)
    other = walk(feed(cut, data(), workers=workers), 9)
    assert [content(batch) for batch in other] == [content(batch) for batch in plain]
    assert [batch.step for batch in other] == list(range(1, 10))


def test_a_micro_batch_says_what_it_holds():
    data = Rows()
    (batch,) = walk(feed(data=data), 1)
    assert sorted(i for m in batch.micro_batches for i in m.ids) == sorted(batch.samples.ids)
    for micro_batch in batch.micro_batches:
        lengths = data.lengths[list(micro_batch.ids)]
        assert micro_batch.num_tokens == lengths.sum()
        assert micro_batch.num_positions == len(lengths) * lengths.max()
        labels = [data[i]["labels"][1:] for i in micro_batch.ids]
        terms = sum(int((each != -100).sum()) for each in labels)
        assert micro_batch.weights["cross_entropy"] == terms
        shape = micro_batch.fields["input_ids"].shape
        assert shape == (len(lengths), lengths.max())
    lengths = data.lengths[batch.samples.ids]
    assert batch.num_tokens == lengths.sum()
    sample, length = batch.largest_sample()
    assert sample in batch.samples.ids
    assert length == lengths.max() == data.lengths[sample]


def test_draws_are_keyed_to_step_and_micro_batch_and_not_to_the_rank():
    alone = walk(feed(Fixed(micro=2)), 2)
    keys = [m.rng_key for batch in alone for m in batch.micro_batches]
    assert len(set(keys)) == len(keys) == 8
    ranks = [walk(feed(Fixed(micro=2), world=World(rank=r, size=2)), 2) for r in range(2)]
    for step in range(2):
        shared = [m for rank in ranks for m in rank[step].micro_batches]
        assert [m.ids for m in shared] == [m.ids for m in alone[step].micro_batches]
        assert [m.rng_key for m in shared] == [m.rng_key for m in alone[step].micro_batches]


def test_a_rank_may_be_left_without_a_sample():
    counts = []
    for rank in range(4):
        world = World(rank=rank, size=4)
        source = feed(Fixed(micro=1), world=world, global_batch=3)
        counts.append([len(batch.micro_batches) for batch in walk(source, 4)])
    assert sorted(counts) == [[0] * 4, *[[1] * 4] * 3]


@pytest.mark.parametrize(("workers", "data"), [(0, Rows), (1, Plain)])
def test_a_smaller_cut_keeps_the_samples_and_counts_from_then_on(workers, data):
    source = feed(Fixed(micro=8), data(), workers=workers)
    batch = source.next()
    source.prefetch()
    finer = source.smaller(batch)
    assert (batch.samples.ids == finer.samples.ids).all()
    assert source.cursor == batch.samples.after
    fresh = walk(feed(Fixed(micro=4), data()), 2)
    assert [content(finer), content(source.next())] == [content(each) for each in fresh]
    source.use(Fixed(micro=1))
    assert source.smaller(source.next()) is None, "nothing is smaller than one sample"
    source.close()


def test_a_sample_beyond_what_memory_allows_is_named_by_its_id():
    data = Rows()
    source = feed(Auto().tuned(9, Cost()), data)
    with pytest.raises(DoesNotFitError) as raised:
        walk(source, 9)
    sample = int(str(raised.value).split()[1])
    assert f"sample {sample} of {data.lengths[sample]} tokens" in str(raised.value)
    assert "data.max_length" in str(raised.value)
    source.close()


class Gated(Rows):
    """Counts the samples that are read ahead, which are read only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.read_ahead = 0
        self.gate = threading.Event()

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
            self.read_ahead += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("name", "limit", "steps"),
    [("BYTES_AHEAD", 10**6, STEPS_AHEAD), ("BYTES_AHEAD", 1, 1), ("PREFETCH_LIMIT_BYTES", 10, 0)],
)
def test_light_steps_are_prepared_in_a_row_of_bounded_size(name, limit, steps, monkeypatch):
    monkeypatch.setattr(f"trainer.training.batches.{name}", limit)
    data = Gated()
    data.gate.set()
    source = feed(data=data, global_batch=4)
    source.next()
    for _ in range(2):  # the second call adds nothing to a burst that is on its way
        source.prefetch()
    for _ in range(steps + 1):
        source.next()
    assert data.read_ahead == 4 * steps
    source.close()
