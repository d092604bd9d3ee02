"""Declared state that a forward moves is as it was when a step is replayed, and after tuning."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.lib.support import VOCABULARY, Bench, Failing
from trainer.accumulate.rollback import Snapshot
from trainer.core.micro_batch import Fields
from trainer.objectives.base import Objective, Sums
from trainer.objectives.next_token import NextToken
from trainer.plan.cuts import Fixed
from trainer.training.step import train_step
from trainer.tune.workload import restoring

WIDTH = 4


class Toy(nn.Module):
    """A causal model that adds to its hidden states what its subclass moves in each forward."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=max_norm)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(hidden + self.move(hidden.detach().mean((0, 1))))

    def move(self, mean: Tensor) -> Any:
        """Move something, and give what it is now."""
        return torch.zeros(())

    def state(self) -> object:
        """Read what is to be put back and is in no `state_dict`."""


class Buffers(Toy):
    """Replaces one, writes into one that no checkpoint saves, appends to one; scales rows read."""

    def __init__(self) -> None:
        super().__init__(max_norm=0.9)
        self.register_buffer("center", None)
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("bank", torch.randn(3, WIDTH))

    def move(self, mean: Tensor) -> Tensor:
        self.center = mean if self.center is None else 0.9 * self.center + 0.1 * mean
        self.average.mul_(0.9).add_(mean, alpha=0.1)
        self.bank.data = torch.cat([self.bank, mean[None]])[-7:]
        return self.center + self.average + self.bank[0] + len(self.bank)

    def state(self) -> object:
        return [self.average, self.center]


class Drawing(Toy):
    """Draws from generators of its own, and counts in what it gives checkpoints besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.draws, self.own = random.Random(3), torch.Generator().manual_seed(2)
        self.numbers, self.old = np.random.default_rng(1), np.random.RandomState(4)
        self.counts = {"calls": 0}

    def move(self, mean: Tensor) -> Tensor:
        self.counts["calls"] += 1
        number = self.numbers.random() + self.draws.random() + self.old.rand()
        return torch.rand(WIDTH, generator=self.own) + number * self.counts["calls"]

    def state(self) -> object:
        states = self.numbers.bit_generator.state, self.old.get_state(), self.draws.getstate()
        return [*map(str, states), self.own.get_state()]

    def get_extra_state(self) -> dict[str, int]:
        return self.counts

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counts = state


class Reaching(Toy):
    """Notes in a number how far a buffer of its own is up to date, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)
        self.reach = 0

    def move(self, mean: Tensor) -> Tensor:
        if self.reach < 1:
            self.reach, self.table = 1, torch.ones(WIDTH)
        return self.table

    def state(self) -> object:
        return [self.reach, self.table]


class Flagged(Toy):
    """Registers a hook in its first forward, and notes in a flag that it did."""

    ready = False

    def move(self, mean: Tensor) -> Tensor:
        if not self.ready:
            self.head.register_forward_hook(lambda _module, _taken, given: 2 * given)
            self.ready = True
        return mean


def plain(value: Any) -> Any:
    """Copy into lists and numbers, which compare by value."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(key, plain(entry)) for key, entry in value.items()]
    return [*map(plain, value)] if isinstance(value, list | tuple) else repr(value)


def after_three_steps(
    model: Callable[[], Toy], fails_at: int, objective: Objective | None = None
) -> Any:
    """Train; memory runs out in a backward of a step, or all are cut finer from there on."""
    bench = Bench(
        Fixed(micro=6),
        model=model,
        strategy=Failing(1, "backward"),
        objective=objective or NextToken(),
    )
    for number in range(1, 4):
        bench.strategy.done = number != fails_at
        batch = bench.feed.next()
        if number == -fails_at:
            batch = bench.feed.smaller(batch)
        report = train_step(bench.context, batch, bench.feed)
        assert report.replays == (number == fails_at)
    return [plain(bench.module.state_dict()), plain(bench.module.state())]


@pytest.mark.parametrize(
    ("toy", "number"), [(Buffers, 2), (Drawing, 2), (Flagged, 1), (Reaching, 1)]
)
def test_a_replay_begins_with_everything_as_it_was(toy, number):
    assert after_three_steps(toy, number) == after_three_steps(toy, -number)


@pytest.mark.parametrize("toy", [Buffers, Drawing, Flagged, Reaching])
def test_a_rehearsal_leaves_everything_as_it_was(toy):
    model = toy().double()
    ids = torch.arange(6).view(2, 3)
    for num_before in (0, 20):
        for _ in range(num_before):
            model(ids)
        before = plain(model.state_dict()), plain(model.state())
        with restoring(model):
            for _ in range(20):
                model(ids).sum().backward()
        assert (plain(model.state_dict()), plain(model.state())) == before
    assert len(model.head._forward_hooks) == (toy is Flagged), "a flag stays, with what it is for"


class Averaging(nn.Module, Objective):
    """A criterion that divides by a running mean in a buffer, and draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.draws = torch.Generator().manual_seed(1)

    metric_names = NextToken.metric_names

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return NextToken().weights(fields)

    def sums(self, model: Any, fields: Fields) -> Sums:
        total = NextToken().sums(model, fields).losses["cross_entropy"]
        self.mean.mul_(0.9).add_(total.detach(), alpha=0.1)
        scale = torch.rand((), generator=self.draws) / self.mean
        return Sums(losses={"cross_entropy": total * scale})


def test_a_replay_begins_with_the_objective_as_it_was():
    one, other = Averaging(), Averaging()
    assert after_three_steps(Toy, 2, one) == after_three_steps(Toy, -2, other)
    assert torch.equal(one.mean, other.mean)


def test_a_buffer_that_several_modules_share_is_copied_once():
    table, model = torch.ones(3), nn.ModuleList(nn.Module() for _ in range(4))
    for part in model:
        part.register_buffer("table", table)
    snapshot = Snapshot(model)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as made:
        snapshot.take()
    assert [each.count for each in made.key_averages() if each.key == "aten::empty_like"] == [1]
    table.zero_()
    snapshot.restore()
    assert table.tolist() == [1.0, 1.0, 1.0]
