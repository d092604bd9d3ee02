"""Measures what a collective takes between the ranks of a run, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.plan.traffic import Network
from trainer.world import World

SMALL_BYTES = 64
SIZES = (2**20, 2**23, 2**26)
"""Bytes of the tensors that are sent, one after the other until one takes long enough."""

TELLING_S = 0.004
"""What a collective must take for its time to tell of bandwidth rather than of latency."""

ROUNDS = 3
"""The quickest of them counts: a disturbance only adds time."""

Collective = Callable[[Tensor, Tensor], Any]
"""Takes a tensor that every rank holds whole, and this rank's part of another."""


def network_of(world: World, saved: Mapping[str, Any] | None = None) -> Network | None:
    """Measure the network between all ranks, or take what a checkpoint kept. Collective.

    Args:
        world: all ranks.
        saved: what was measured when the run began; counts between as many ranks.

    Returns:
        The same numbers on every rank; None on one rank, or where several are only imagined.
    """
    if world.size == 1 or world.patient is None:
        return None
    if saved is not None and saved["ranks"] == world.size:
        return Network(**saved)
    latency = _seconds(world, _all_reduce, SMALL_BYTES)

    def rate(collective: Collective, times: int) -> float:
        """Give the bytes per second that a rank sends, `times` the size over all ranks."""
        size, took = 0, 0.0
        for size in SIZES:
            took = _seconds(world, collective, size)
            if took >= TELLING_S:
                break
        return times * size * (world.size - 1) / world.size / max(took - latency, took / 2)

    return Network(
        ranks=world.size,
        latency_s=latency,
        all_reduce=rate(_all_reduce, 2),
        all_gather=rate(_all_gather, 1),
        reduce_scatter=rate(_reduce_scatter, 1),
    )


def _all_reduce(whole: Tensor, part: Tensor) -> None:
    dist.all_reduce(whole)


def _all_gather(whole: Tensor, part: Tensor) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part)


def _reduce_scatter(whole: Tensor, part: Tensor) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole)


def _seconds(world: World, collective: Collective, size: int) -> float:
    """Time one collective; every rank hears what the first one measured."""
    held = -(-size // torch.float32.itemsize // world.size)
    part = torch.zeros(held, device=world.device)
    whole = torch.zeros(held * world.size, device=world.device)
    best = float("inf")
    for _ in range(ROUNDS):
        world.barrier()
        started = time.perf_counter()
        collective(whole, part)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        best = min(best, time.perf_counter() - started)
    [agreed] = world.sum_numbers([best if world.is_main else 0.0])
    return agreed
