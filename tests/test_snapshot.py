"""Whatever a forward moves is as it was when a step is replayed, and after tuning."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import VOCABULARY, Bench
from tests.test_step import Failing
from trainer import step
from trainer.accumulate import held, snapshot
from trainer.errors import ConfigError, DoesNotFitError
from trainer.plan.cuts import Fixed
from trainer.tune import untouched as keeping

WIDTH = 4


class Toy(nn.Module):
    """A causal model that adds to its hidden states what its subclass moves in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(hidden + self.move(hidden.detach().mean((0, 1))))

    def move(self, mean: Tensor) -> Any:
        """Move something, and give what it is now."""
        return torch.zeros(())

    def state(self) -> object:
        """Read all that is to be put back."""


class LazyCenter(Toy):
    """Makes a running mean in its first forward, and replaces it in each."""

    def __init__(self) -> None:
        super().__init__()
        self.center = None

    def move(self, mean: Tensor) -> Tensor:
        self.center = mean if self.center is None else 0.9 * self.center + 0.1 * mean
        return self.center

    def state(self) -> object:
        return self.center


class LateCenter(LazyCenter):
    """Registers a buffer in its first forward, and writes into it from then on."""

    def move(self, mean: Tensor) -> Tensor:
        if self.center is None:
            del self.center
            self.register_buffer("center", mean.clone())
        return self.center.mul_(0.9).add_(mean, alpha=0.1).clone()


class Nested(Toy):
    """Writes into containers in containers, and fills them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"average": [torch.zeros(WIDTH)], "recent": deque(maxlen=3)}
        self.pair, self.seen, self.table = ([0], {"none": set()}), set(), {}

    def move(self, mean: Tensor) -> Tensor:
        average, recent = self.held["average"][0], self.held["recent"]
        average.mul_(0.9).add_(mean, alpha=0.1)
        recent.append(mean)
        self.pair[0][0] += 1
        self.seen.add(self.pair[0][0])
        self.pair[1]["none"].add(len(self.seen))
        self.table[self.pair[0][0] % 4] = self.table.pop(1, mean)
        return average + sum(recent) + 0.1 * len(self.seen) + sum(self.table.values())

    def state(self) -> object:
        return [self.held, self.pair, self.seen, self.table]


class Tracker:
    """Plain, and leads back to its model."""

    def __init__(self, model: nn.Module) -> None:
        self.mean, self.inner, self.model = torch.zeros(WIDTH), SimpleNamespace(calls=0), model


class InObject(Toy):
    """Keeps a mean in an object, and a counter in an object of that."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker(self)

    def move(self, mean: Tensor) -> Tensor:
        self.tracker.mean = 0.9 * self.tracker.mean + 0.1 * mean
        self.tracker.inner.calls += 1
        self.tracker.late = getattr(self.tracker, "late", 0) + 1
        return self.tracker.mean + 0.1 * self.tracker.inner.calls + self.tracker.late

    def state(self) -> object:
        late = getattr(self.tracker, "late", 0)
        return [self.tracker.mean, self.tracker.inner.calls, late]


class Arrays(Toy):
    """Writes into NumPy arrays, and draws from a generator in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.held = np.zeros(WIDTH), {"draws": np.random.default_rng(1)}
        self.own = torch.Generator().manual_seed(2)

    def move(self, mean: Tensor) -> Tensor:
        self.mean *= 0.9
        self.mean += 0.1 * mean.numpy() + self.held["draws"].random()
        return torch.from_numpy(self.mean.copy()) + torch.rand(WIDTH, generator=self.own)

    def state(self) -> object:
        return [self.mean, str(self.held["draws"].bit_generator.state), self.own.get_state()]


class Rolling(Toy):
    """Rolls a bank of 128 KiB behind autograd's back, as one does with keys of contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(2**14 // WIDTH, WIDTH))

    def move(self, mean: Tensor) -> Tensor:
        self.bank.data = torch.roll(self.bank, 1, 0)
        return self.bank[0].clone()

    def state(self) -> object:
        return self.bank


class RollingLate(Rolling):
    """Only reads its bank in the first step, and writes without a trace."""

    def move(self, mean: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 3:
            self.bank.data[:1] = mean
            self.bank.data.copy_(torch.roll(self.bank, 1, 0))
        return self.bank[0].clone()


class Growing(Rolling):
    """Appends to a bank that it began with, which changes its shape."""

    def move(self, mean: Tensor) -> Tensor:
        self.bank.data = torch.cat([self.bank, mean[None]])[-(2**14 // WIDTH + 7) :]
        return self.bank[0] + len(self.bank)


class Hidden(Toy):
    """Moves a teacher that it keeps from being registered."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def move(self, mean: Tensor) -> Tensor:
        self.teacher[0].weight.data.lerp_(mean.float().expand(WIDTH, WIDTH), 0.3)
        return self.teacher[0](mean.float())

    def state(self) -> object:
        return self.teacher[0].weight.detach()


class Renormalised(Toy):
    """Scales the rows of its embedding that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.9)

    def state(self) -> object:
        return self.embed.weight.detach()


@pytest.fixture(autouse=True)
def _garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting it takes longer than all the steps of a test, and nothing here depends on it."""
    monkeypatch.setattr(step, "release_memory", lambda: None)


TOYS = [LazyCenter, LateCenter, Nested, InObject, Arrays, Rolling, RollingLate, Growing, Hidden]


POINTS = [(0, "forward"), (0, "backward"), (1, "between"), (1, "forward"), (1, "backward")]
"""Micro-batches, and where in them, or before them, memory runs out."""


def plain(value: Any) -> Any:
    """Copy into lists and numbers, which compare by value."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(key, plain(entry)) for key, entry in value.items()]
    return [*map(plain, value)] if isinstance(value, list | tuple | deque) else repr(value)


def after_three_steps(model: Callable[[], Toy], strikes: Mapping[int, tuple[int, str]]) -> Any:
    """Train; memory runs out in some steps, or these are cut finer from the start."""
    bench = Bench(Fixed(micro=6), model=model, strategy=Failing(0, "forward"))
    strategy = bench.kit.strategy
    for number in range(1, 4):
        at, phase = strikes.get(number, (0, "none"))
        strategy.at, strategy.phase, strategy.done = at, phase, phase in {"none", "finer"}
        batch = bench.feed.next()
        if phase == "finer":
            batch = batch.smaller()
        report = step.train_step(bench.kit, batch)
        assert report.replays == (number in strikes and phase != "finer")
    return [plain(bench.module.state_dict()), plain(bench.module.state())]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("toy", TOYS)
def test_a_replay_begins_with_everything_as_it_was(toy: type[Toy], number: int) -> None:
    expected = after_three_steps(toy, {number: (0, "finer")})
    for at, phase in POINTS:
        assert after_three_steps(toy, {number: (at, phase)}) == expected, (at, phase)


@pytest.mark.parametrize("toy", [*TOYS, Renormalised])
def test_a_rehearsal_leaves_everything_as_it_was(toy: type[Toy]) -> None:
    model = toy().double()
    ids = torch.arange(6).view(2, 3)
    for num_before in (0, 20):
        for _ in range(num_before):
            model(ids)
        before = plain(model.state_dict()), plain(model.state()), sorted(vars(model))
        with keeping.untouched(model):
            for _ in range(20):
                model(ids).sum().backward()
        assert (plain(model.state_dict()), plain(model.state()), sorted(vars(model))) == before


class Crowd(Toy):
    """Moves something of which there is no copy."""

    def __init__(self, moves: str) -> None:
        super().__init__()
        self.moves = moves
        self.plain = torch.zeros(64)
        self.numbers, self.tracker = np.zeros(64), SimpleNamespace(calls=[*range(64)])

    def move(self, mean: Tensor) -> Tensor:
        if self.moves == "tracker.calls":
            self.tracker.calls.append(0)
        elif self.moves == "numbers":
            self.numbers += 1.0
        elif self.moves == "plain":
            self.plain.data.add_(1.0)
        elif self.moves == "embed.weight":
            with torch.no_grad():
                self.embed.weight.mul_(1.0)
        return mean


@pytest.fixture
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "EVERY_BYTES", 0)
    monkeypatch.setattr(snapshot, "UNSEEN_BYTES", 0)
    monkeypatch.setattr(keeping, "COPIED_BYTES", 0)
    monkeypatch.setattr(held, "MOST_ENTRIES", 32)


def test_rows_of_an_embedding_that_are_renormalised_do_not_end_a_replay() -> None:
    expected = after_three_steps(Renormalised, {2: (0, "finer")})
    assert after_three_steps(Renormalised, {2: (1, "backward")}) == expected


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("moves", ["tracker.calls", "numbers", "plain", "embed.weight"])
def test_what_moves_and_cannot_be_put_back_ends_the_run_and_is_named(moves: str) -> None:
    assert after_three_steps(lambda: Crowd("nothing"), {2: (1, "forward")})
    for phase in ("forward", "backward"):
        with pytest.raises(DoesNotFitError, match=f"step 1: out of memory, and {moves} ") as told:
            after_three_steps(lambda: Crowd(moves), {1: (1, phase)})
        assert "\n" not in str(told.value)


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("moves", ["tracker.calls", "embed.weight"])
def test_a_rehearsal_that_cannot_be_undone_is_refused(moves: str) -> None:
    model, refused = Crowd(moves), pytest.raises(ConfigError, match=f"cannot be undone: {moves} ")
    with refused, keeping.untouched(model):
        model(torch.arange(6).view(2, 3))


def test_tools_are_left_alone() -> None:
    """Locks, files and loggers neither stop a walk nor are they looked into."""
    model = Toy()
    model.lock, model.log = threading.Lock(), logging.getLogger("tests.snapshot")
    model.thread, model.function, model.stream = threading.current_thread(), print, sys.stdout
    level = model.log.level
    kept = snapshot.Snapshot(model)
    kept.take()
    model.log.setLevel(level + 1)
    model.lock, lock = None, model.lock
    assert kept.restore() is None
    assert model.lock is lock
    assert model.log.level == level + 1
    model.log.setLevel(level)


def test_a_model_that_keeps_its_parts_is_walked_once() -> None:
    """What was found serves the next steps, until something is replaced that is not simple."""
    model, walks = InObject(), []
    kept = snapshot.Snapshot(model)
    for value in (None, 1, 2, torch.zeros(1), torch.zeros(1)):
        model.tracker.inner.calls = value
        kept.take()
        walks.append(kept._held)
    assert [walks[0] is walk for walk in walks] == [True, True, True, False, False]
