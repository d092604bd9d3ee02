"""Declared state that a forward moves is as it was when a step is replayed, and after tuning."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.lib.nightly import nightly
from tests.lib.support import VOCABULARY, Bench, Failing
from trainer.accumulate.rollback import Snapshot
from trainer.core.coupling import Coupling
from trainer.objectives.base import Objective, Sums
from trainer.objectives.next_token import NextToken
from trainer.plan.cuts import Fixed
from trainer.training.step import train_step
from trainer.tune.workload import restoring

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
        """Read what is to be put back and is in no `state_dict`."""


class Buffers(Toy):
    """Replaces one, writes into one that no checkpoint saves, appends to one through `.data`."""

    def __init__(self) -> None:
        super().__init__()
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


class Normed(Toy):
    """Moves running statistics, and normalises by them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.coupling = Coupling("micro_batch")  # as in a run

    def move(self, mean: Tensor) -> Tensor:
        self.norm(mean[None].expand(2, WIDTH))
        return self.norm.running_mean + self.norm.num_batches_tracked


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


class Renormalised(Toy):
    """Scales the rows of its embedding that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.9)


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


POINTS = [(0, "forward"), (1, "between"), (1, "backward")]
"""Micro-batches, and where in them, or before them, memory runs out."""


def plain(value: Any) -> Any:
    """Copy into lists and numbers, which compare by value."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(key, plain(entry)) for key, entry in value.items()]
    return [*map(plain, value)] if isinstance(value, list | tuple) else repr(value)


def after_three_steps(
    model: Callable[[], Toy],
    strikes: Mapping[int, tuple[int, str]],
    objective: Objective | None = None,
) -> Any:
    """Train; memory runs out in some steps, or these are cut finer from the start."""
    settings = {} if objective is None else {"objective": objective}
    bench = Bench(Fixed(micro=6), model=model, strategy=Failing(0, "forward"), **settings)
    strategy = bench.strategy
    for number in range(1, 4):
        at, phase = strikes.get(number, (0, "none"))
        strategy.at, strategy.phase, strategy.done = at, phase, phase in {"none", "finer"}
        batch = bench.feed.next()
        if phase == "finer":
            batch = bench.feed.smaller(batch)
        report = train_step(bench.context, batch, bench.feed)
        assert report.replays == (number in strikes and phase != "finer")
    return [plain(bench.module.state_dict()), plain(bench.module.state())]


class Flagged(Toy):
    """Registers a hook in its first forward, and notes in a flag that it did."""

    ready = False

    def move(self, mean: Tensor) -> Tensor:
        if not self.ready:
            self.head.register_forward_hook(lambda _module, _taken, given: 2 * given)
            self.ready = True
        return mean


@pytest.mark.parametrize(
    ("toy", "number", "points"),
    [
        (Buffers, 2, POINTS[1:]),
        *((Drawing, 2, POINTS[2:]), (Normed, 2, POINTS[2:]), (Renormalised, 2, POINTS[2:])),
        (Flagged, 1, POINTS[2:]),
        *(nightly(Buffers, number, POINTS) for number in (1, 2, 3)),
        *(nightly(Drawing, number, POINTS[2:]) for number in (1, 3)),
    ],
)
def test_a_replay_begins_with_everything_as_it_was(toy, number, points):
    # Micro-batches of what is normalised are tried once more as they are, not in a finer cut.
    expected = after_three_steps(toy, {} if toy is Normed else {number: (0, "finer")})
    for at, phase in points:
        assert after_three_steps(toy, {number: (at, phase)}) == expected, (at, phase)


@pytest.mark.parametrize("toy", [Buffers, Drawing, Normed, Renormalised, Flagged, Reaching])
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

    def weights(self, fields: Mapping[str, Tensor]) -> Mapping[str, float]:
        return NextToken().weights(fields)

    def sums(self, model: Any, fields: Mapping[str, Tensor]) -> Sums:
        total = NextToken().sums(model, fields).losses["cross_entropy"]
        self.mean.mul_(0.9).add_(total.detach(), alpha=0.1)
        scale = torch.rand((), generator=self.draws) / self.mean
        return Sums(losses={"cross_entropy": total * scale})


def test_a_replay_begins_with_the_objective_as_it_was():
    one, other = Averaging(), Averaging()
    expected = after_three_steps(Toy, {2: (0, "finer")}, one)
    assert after_three_steps(Toy, {2: (1, "backward")}, other) == expected
    assert torch.equal(one.mean, other.mean)


def test_a_buffer_that_several_modules_share_is_copied_once():
    table, model = torch.ones(3), nn.ModuleList(nn.Module() for _ in range(4))
    for part in model:
        part.register_buffer("table", table)
    snapshot = Snapshot(model)
    with profile(activities=[ProfilerActivity.CPU]) as made:
        snapshot.take()
    assert [each.count for each in made.key_averages() if each.key == "aten::empty_like"] == [1]
    table.zero_()
    snapshot.restore()
    assert table.tolist() == [1.0, 1.0, 1.0]
