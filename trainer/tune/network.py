"""Measure what a collective takes between the ranks of a run, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.world import World
from trainer.parallel.base import all_gather, reduce_scatter
from trainer.plan.traffic import Network

SMALL_BYTES = 64
SIZES = (2**16, 2**20, 2**23, 2**26)
"""Bytes of the tensors that are sent, one after the other until one takes long enough."""

TELLING_S = 0.004
"""What a collective must take for its time to tell of bandwidth rather than of latency."""

ROUNDS = 3
"""The quickest of them counts: a disturbance only adds time."""

MOST_S = 0.3
"""For all of it, unless sending the least of everything once takes longer."""

PART_S = MOST_S / 5
"""For each of three rates and two latencies."""

GROWTH = 16
"""Of one size to the next, at most."""

Collective = Callable[[Tensor, Tensor, dist.ProcessGroup | None], Any]
"""Takes a tensor that every rank of a group holds whole, and this rank's part of another."""


def network_of(
    world: World, saved: Mapping[str, Any] | None = None, shard: int | None = None
) -> Network | None:
    """Measure the network between all ranks, or take what a checkpoint kept. Collective.

    Args:
        world: all ranks.
        saved: what was measured when the run began; counts between as many ranks.
        shard: neighbouring ranks that share one copy of the model, where there are several copies
            in shards: the network within them, and between them, are measured each on its own.

    Returns:
        The same numbers on every rank; None on one rank, or where the others are not there.
    """
    if world.size == 1 or world.long_timeout_group is None:
        return None
    if saved is not None and (saved["ranks"], saved.get("shard")) == (world.size, shard):
        return Network(**saved)
    with _levels(world, shard) as (within, across):
        latency = within.latency()
        latency_across = latency if shard is None else across.latency()
        return Network(
            ranks=world.size,
            latency_s=latency,
            all_gather=within.rate(_all_gather, 1, latency),
            reduce_scatter=within.rate(_reduce_scatter, 1, latency),
            all_reduce=across.rate(_all_reduce, 2, latency_across),
            shard=shard,
            across_latency_s=None if shard is None else latency_across,
        )


def _all_reduce(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(whole, group=group)


def _all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    all_gather(whole, part, group=group)


def _reduce_scatter(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    reduce_scatter(part, whole, group=group)


@final
@dataclass(frozen=True)
class _Level:
    """Ranks between which the network is the same.

    Attributes:
        world: all ranks; every group of a level measures at once, as they send in a run.
        group: this rank's, of the level.
        size: ranks in it.
    """

    world: World
    group: dist.ProcessGroup | None
    size: int

    def latency(self) -> float:
        """Give the seconds of a collective that sends next to nothing."""
        return self._seconds(_all_reduce, SMALL_BYTES, PART_S)

    def rate(self, collective: Collective, times: int, latency: float) -> float:
        """Give the bytes per second that a rank sends, `times` the size over all ranks."""
        left, began = PART_S, time.perf_counter()
        size, took = 0, 0.0
        for size in SIZES:
            took = self._seconds(collective, size, left)
            [spent] = self._of_first(time.perf_counter() - began)
            left = PART_S - spent
            if took >= TELLING_S or GROWTH * took > left:
                break
        return times * size * (self.size - 1) / self.size / max(took - latency, took / 2)

    def _seconds(self, collective: Collective, size: int, most: float) -> float:
        """Time one collective, a few times or as long as is allowed, by the first rank's clock."""
        device = self.world.device
        count = -(-size // torch.float32.itemsize // self.size)
        part = torch.zeros(count, device=device)
        whole = torch.zeros(count * self.size, device=device)
        best, spent = float("inf"), 0.0
        for _ in range(ROUNDS):
            self.world.barrier()
            started = time.perf_counter()
            collective(whole, part, self.group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            [took] = self._of_first(time.perf_counter() - started)
            best, spent = min(best, took), spent + took
            if spent + took > most:
                break
        return best

    def _of_first(self, seconds: float) -> list[float]:
        return self.world.sum_numbers([seconds if self.world.is_main else 0.0])


@contextmanager
def _levels(world: World, shard: int | None) -> Iterator[tuple[_Level, _Level]]:
    """Lend groups within and between copies of a model; both are all ranks where there is one.

    Yields:
        The level that gathers and scatters, and the one that copies are reduced over.
    """
    if shard is None:
        whole = _Level(world, None, world.size)
        yield whole, whole
        return
    ranks = torch.arange(world.size).view(-1, shard)
    levels = []
    for rows in (ranks, ranks.T):
        groups = [dist.new_group(row.tolist()) for row in rows]
        mine = next(g for g, row in zip(groups, rows, strict=True) if world.rank in row.tolist())
        levels.append(_Level(world, mine, rows.shape[1]))
    within, across = levels
    try:
        yield within, across
    finally:
        world.barrier()
        for level in levels:
            dist.destroy_process_group(level.group)
