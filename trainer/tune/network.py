"""Measure what a collective takes between the ranks of a run, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.world import World
from trainer.parallel.base import all_gather, reduce_scatter
from trainer.plan.traffic import Network

SMALL_BYTES = 64

# Bytes of the tensors that are sent: the larger where the smaller takes next to no time
SIZES = (2**20, 2**24)
ENOUGH_S = 0.004  # what a collective must take for its time to show bandwidth rather than latency
ROUNDS = 3  # the quickest of them counts: a disturbance only adds time
Collective = Callable[[Tensor, Tensor], Any]
"""Takes a tensor that every rank has whole, and this rank's part of another."""


def network_of(world: World, saved: Mapping[str, Any] | None = None) -> Network | None:
    """Measure the network between all ranks, or take what a checkpoint has. Collective.

    Args:
        world: all ranks.
        saved: what was measured when the run began; counts between as many ranks.

    Returns:
        The same numbers on every rank; None on one rank, or where the others are not there.
    """
    if world.size == 1 or world.long_timeout_group is None:
        return None
    if saved is not None and saved["ranks"] == world.size:
        # A checkpoint of an earlier version may have more.
        return Network(**{field.name: saved[field.name] for field in fields(Network)})
    latency = _seconds(world, lambda whole, _: dist.all_reduce(whole), SMALL_BYTES)

    def rate(collective: Collective, times: int = 1) -> float:
        """Give the bytes per second that a rank sends, `times` the size over all ranks."""
        size, took = 0, 0.0
        for size in SIZES:
            took = _seconds(world, collective, size)
            if took >= ENOUGH_S:
                break
        return times * size * (world.size - 1) / world.size / max(took - latency, took / 2)

    return Network(
        ranks=world.size,
        latency_s=latency,
        all_gather=rate(all_gather),
        reduce_scatter=rate(lambda whole, part: reduce_scatter(part, whole)),
        all_reduce=rate(lambda whole, _: dist.all_reduce(whole), times=2),
    )


def _seconds(world: World, collective: Collective, size: int) -> float:
    """Time one collective a few times; gives the least, by the first rank's clock."""
    count = -(-size // torch.float32.itemsize // world.size)
    part = torch.zeros(count, device=world.device)
    whole = torch.zeros(count * world.size, device=world.device)
    least = float("inf")
    for _ in range(ROUNDS):
        world.barrier()
        started = time.perf_counter()
        collective(whole, part)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        least = min(least, time.perf_counter() - started)
    [least] = world.sum_numbers([least if world.is_main else 0.0])
    return least
