"""The way of the data: from a cursor to micro-batches, the same however it is walked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.run_toys import Plain, Rows
from trainer.core.errors import DataError, DoesNotFitError
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.data.view import DataView
from trainer.objectives.next_token import NextToken
from trainer.plan.batch_size import ConstantSize
from trainer.plan.cut import Cost, Cut, Layout
from trainer.plan.cuts import Auto, Budget, Fixed
from trainer.plan.order import Cursor, Order
from trainer.training.batches import BURST_STEPS, Feed, PlannedBatch, Source

CUTS: list[Cut] = [Fixed(micro=3), Budget(max_tokens=40), Fixed(steps=2)]


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
    return Feed(
        Source(order=order, lengths=lengths, loader=loader, objective=NextToken()),
        cut=cut or Budget(max_tokens=40),
        layout=Layout(world_size=world.size),
        world=world,
        seed=0,
        cursor=cursor or order.start,
    )


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
    ("cut", "data", "workers", "quick_s"),
    [
        *((CUTS[0], Rows, 0, quick_s) for quick_s in (0.0, 60.0)),
        *((CUTS[1], Plain, 0, quick_s) for quick_s in (0.0, 60.0)),
        *((CUTS[1], Rows, 1, 0.0), (CUTS[2], Plain, 1, 0.0)),
    ],
)
def test_looking_ahead_and_loading_processes_change_nothing(
    cut, data, workers, quick_s, monkeypatch
):
    monkeypatch.setattr("trainer.training.batches.QUICK_S", quick_s)
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_may_be_left_without_a_sample(workers):
    counts = []
    for rank in range(4):
        world = World(rank=rank, size=4)
        source = feed(Fixed(micro=1), world=world, global_batch=3, workers=workers)
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


class Torn(Rows):
    """Fails at one sample."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if index == 20:
            raise ValueError("torn")
        return super().__getitem__(index)


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
    [("BURST_BYTES", 10**6, BURST_STEPS), ("BURST_BYTES", 1, 1), ("PREFETCH_LIMIT_BYTES", 10, 0)],
)
def test_light_steps_are_prepared_in_bursts_of_bounded_size(name, limit, steps, monkeypatch):
    monkeypatch.setattr(f"trainer.training.batches.{name}", limit)
    monkeypatch.setattr("trainer.training.batches.QUICK_S", 0.0)
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


@pytest.mark.parametrize(("device", "is_read_now"), [("cpu", True), ("meta", False)])
def test_what_is_quickly_read_is_read_at_once_unless_a_device_computes(
    device, is_read_now, monkeypatch
):
    monkeypatch.setattr("trainer.training.batches.QUICK_S", 60.0)
    data = Gated()
    source = feed(data=data, world=World(device=torch.device(device)))
    source.next()
    source.prefetch()
    assert all(future.done() for future in source._ahead) == is_read_now
    data.gate.set()
    source.next()
    assert (data.read_ahead == 0) == is_read_now
    source.close()


def test_a_pause_stops_a_burst_between_two_steps_and_loses_none(monkeypatch):
    monkeypatch.setattr("trainer.training.batches.QUICK_S", 0.0)
    data = Gated()
    source = feed(data=data)
    source.next()
    source.prefetch()
    opening = threading.Timer(0.1, data.gate.set)
    opening.start()
    source.pause()
    opening.join()
    assert data.read_ahead <= 8
    expected = walk(feed(), 4, ahead=False)[1:]
    assert [content(source.next()) for _ in range(3)] == [content(batch) for batch in expected]
    source.close()


def test_a_step_that_failed_ahead_of_time_is_tried_again_in_its_place():
    order, source = Order(44, 0, ConstantSize(global_batch=8)), feed(data=Torn())
    failing = order.start
    while 20 not in (samples := order.next(failing)).ids:
        failing = samples.after
        source.next()
        source.prefetch()
    for _ in range(2):
        with pytest.raises(DataError, match="sample 20 of Torn"):
            source.next()
        assert source.cursor == failing
    source.close()


ACCELERATOR = World(device=torch.device("meta"))


@pytest.mark.parametrize(("data", "workers"), [(Rows, 0), (Plain, 1)])
def test_the_next_batch_is_loaded_while_a_device_computes_and_the_cursor_waits(data, workers):
    plain = walk(feed(data=data(), workers=workers), 4, ahead=False)
    source, found = feed(data=data(), workers=workers, world=ACCELERATOR), []
    for step in range(1, 5):
        found.append(source.next())
        source.prefetch()
        source.load_next(last_step=4)
        assert source.cursor == found[-1].samples.after
        assert (source._next is not None) == (step < 4), "nothing follows the last step"
    source.close()
    assert [content(batch) for batch in found] == [content(batch) for batch in plain]


def test_loading_the_next_batch_of_a_device_is_a_phase_of_its_own_within_the_update():
    world, phases = World(device=torch.device("meta")), []
    source = feed(world=world)
    source.next()
    world.times.on_phase = phases.append
    world.note("update")
    source.load_next(last_step=9)
    assert phases == ["update", "next data", "update"]


def test_a_replay_drops_what_was_loaded_with_another_cut():
    source = feed(Fixed(micro=8), world=ACCELERATOR)
    batch = source.next()
    source.load_next(last_step=9)
    finer = source.smaller(batch)
    fresh = walk(feed(Fixed(micro=4)), 2)
    assert [content(finer), content(source.next())] == [content(each) for each in fresh]


class Broken(Rows):
    """Loses its rows after the first batch."""

    draws_randomness = True  # read when they are needed
    is_lost = False

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if self.is_lost:
            raise OSError("gone")
        return super().__getitem__(index)


def test_what_cannot_be_loaded_ahead_is_said_when_it_is_needed():
    data = Broken()
    source = feed(data=data, world=ACCELERATOR)
    source.next()
    data.is_lost = True
    source.load_next(last_step=9)
    with pytest.raises(DataError, match="gone"):
        source.next()


@pytest.mark.parametrize(("limit", "planned"), [(10**6, 2), (1, 1)])
def test_workers_have_the_whole_next_step_in_hand_within_the_limit(limit, planned, monkeypatch):
    monkeypatch.setattr("trainer.training.batches.PREFETCH_LIMIT_BYTES", limit)
    source = feed(Fixed(micro=1), workers=2)
    for _ in range(2):
        source.next()
        # The step behind the next is planned once a worker was given all of the next.
        assert len(source._queue) == planned
    source.use(Fixed(micro=2))  # another number of micro-batches
    source.next()
    assert len(source._queue) == planned + (limit > 1)
    source.close()
