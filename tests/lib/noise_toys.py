"""Gradients that are Gaussian: of a loss that is linear in the weights, whatever these are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.lib.support import Bench
from trainer.core.micro_batch import Fields
from trainer.core.world import World
from trainer.features.batch_size.measure import MeasuredNoise
from trainer.features.batch_size.noise_scale import NoiseScale
from trainer.objectives.base import Objective, Sums
from trainer.plan.cut import Cost, Layout
from trainer.plan.cuts import Budget

WIDTH = 64
NOISE, SIGNAL = 240.0, 1.0  # S of a token, and |G|^2: a noise scale of 240 tokens, 24 samples


class Gaussian:
    """Samples of 1 to some hundred tokens, each of which adds G and noise to the gradient.

    By `by_length` the gradient of a long sample differs from that of a short one.
    """

    draws_randomness = False

    def __init__(self, num_samples: int = 4096, by_length: float = 0.0) -> None:
        numbers = np.random.default_rng(0)
        self.lengths = np.exp(numbers.normal(2.0, 0.8, num_samples)).astype(np.int64) + 1
        self.counts = torch.from_numpy(self.lengths).double()
        noise = torch.from_numpy(numbers.normal(0, (NOISE / WIDTH) ** 0.5, (num_samples, WIDTH)))
        steady = torch.zeros(WIDTH, dtype=torch.float64)
        steady[0] = SIGNAL**0.5
        self.rows = self.counts[:, None] * steady + self.counts[:, None].sqrt() * noise
        self.rows[:, 1] += by_length * self.counts * (self.counts.log() - 2.0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {"labels": torch.ones(int(self.lengths[index])), "x": self.rows[index]}

    @property
    def noise_scale(self) -> float:
        """That of the samples as they are, in tokens."""
        mean = self.rows.sum(0) / self.counts.sum()
        apart = (self.rows - self.counts[:, None] * mean).square().sum() / self.counts.sum()
        return float(apart / mean.square().sum())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class DoubleLinear(nn.Module):
    """The product of its weights and a row, in double precision as the data of `Gaussian` are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), Scale()])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(part) for block, part in zip(self.blocks, x.chunk(2, 1), strict=True))


class Linear(Objective):
    """Sums what the model gives, over tokens."""

    def sums(self, model: Any, fields: Fields) -> Sums:
        return Sums(losses={"linear": model(fields).sum()})

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"linear": float((fields["labels"] > 0).sum())}


def bench_of(cut: Any, dataset: Any = None, world: World | None = None, **how: Any) -> Bench:
    """A step whose gradient is Gaussian, of 128 samples."""
    own = {"model": DoubleLinear, "objective": Linear(), "dataset": dataset or Gaussian()}
    return Bench(cut, global_batch=128, world=world or World(), **own, **how)


def measured(bench: Bench, num_steps: int, random_slots: int | None = None) -> float:
    """Take steps that measure; gives the noise scale. `random_slots` are claimed of every cut."""
    part, feature = NoiseScale("tokens"), MeasuredNoise(asked=1, unit="tokens", every=1)
    bench.context = replace(bench.context, parts=[part], measuring=feature.measuring())
    bench.feed.recut = feature.recut
    if random_slots is not None:
        bench.feed.recut = lambda plan, *_: replace(plan, random_slots=random_slots)
    for _ in range(num_steps):
        bench.step()
        figures = part.metrics()
    return float(figures["noise_scale"])


def measure_each(world: World, ways: list[tuple[str, str]], num_steps: int) -> list[float]:
    """Measure on real ranks, in each layout under a sync policy."""
    from tests.lib.ranks_work import MODES, POLICIES  # noqa: PLC0415 - which others need not have

    # Large micro-batches everywhere, so that all draw as many samples.
    layout, found = Layout(cost=Cost(fixed=500.0)), []
    for mode, sync in ways:
        how = {"world": world, "layout": layout, "lay_out": MODES[mode], "sync": POLICIES[sync]()}
        found.append(measured(bench_of(Budget(max_tokens=1000), **how), num_steps))
    return found
