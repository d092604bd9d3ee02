"""Work out what a number of ranks costs: steps, the start, checkpoints. Numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from trainer.core.world import GROUP

ORIGIN = "measured on 2 to 64 gloo processes of one machine, and extrapolated"
# By `benchmarks/ranks.py`, on two cores: the time times the cores, over all messages of all ranks,
# 0.27 to 0.34 ms for numbers and 0.39 to 0.47 ms for texts at 4 to 32 ranks
MESSAGE_S, TEXT_S = 3e-4, 4.5e-4
# Likewise over the ranks, until all have joined: 0.12, 0.42 and 0.63 s a rank of 16, 32 and 64; a
# rank of its own core connects to each other one
JOIN_S, JOIN_PAIR_S = 0.05, 0.009
VECTORS = 3  # that hosts agree on in a step: weights, what came out, whether to stop or save
GATHERS = 12  # texts that ranks gather of each other until the first step
SAVE_GATHERS = 2  # likewise in a save: whether all is finite, and what each has written
HASHED_PER_S = 1.4e9  # bytes that a rank writes at most: one core's SHA-256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of a run's parts; None where what they follow from is not known."""

    compute_s: float | None
    network_s: float | None
    agree_s: float
    step_s: float | None
    bound: str | None  # by which part of a step it is bound
    join_s: float
    gather_s: float
    checkpoint_s: float | None


def agree_seconds(ranks: int) -> float:
    """Give what agreement adds to a step: a message passes each rank of a group twice, and back."""
    return VECTORS * MESSAGE_S * _messages(ranks, 2, 1)


def gather_seconds(ranks: int) -> float:
    """Give what a gathering takes: each rank's size and text pass the others, and all come back."""
    return TEXT_S * _messages(ranks, 2, 2)


def _messages(ranks: int, rounds: int, ways_back: int) -> int:
    """Count messages one behind the other, through groups of growing distance and back."""
    found = 0
    while ranks > 1:
        size = min(GROUP, ranks)
        found += rounds * (size - 1) + ways_back * (size - 1).bit_length()
        ranks = -(-ranks // GROUP)
    return found


def estimate(
    *,
    ranks: int,
    compute_s: float | None,
    sent: float,
    network: float | None,
    overlaps: bool,
    state_bytes: float,
    storage: float | None,
    writers: int,
) -> Estimate:
    """Estimate a run.

    Args:
        ranks: how many there are.
        compute_s: of the slowest rank's micro-batches in a step.
        sent: bytes that a rank sends in a step.
        network: bytes a second that a rank can send.
        overlaps: whether bytes travel while micro-batches compute.
        state_bytes: of a checkpoint.
        storage: bytes a second that all ranks together can write.
        writers: ranks that write a checkpoint.
    """
    network_s, agree_s, step_s, bound = None, agree_seconds(ranks), None, None
    gather_s, checkpoint_s = gather_seconds(ranks), None
    if storage is not None:
        checkpoint_s = state_bytes / min(storage, writers * HASHED_PER_S) + SAVE_GATHERS * gather_s
    if network is not None:
        network_s = sent / network
    if compute_s is not None and network_s is not None:
        step_s = compute_s + network_s + agree_s
        if overlaps:
            step_s = max(compute_s, network_s) + agree_s
        parts = {"computing": compute_s, "the network": network_s, "agreement": agree_s}
        bound = max(parts, key=lambda name: parts[name])
    return Estimate(
        compute_s=compute_s,
        network_s=network_s,
        agree_s=agree_s,
        step_s=step_s,
        bound=bound,
        join_s=JOIN_S + JOIN_PAIR_S * ranks,
        gather_s=GATHERS * gather_s,
        checkpoint_s=checkpoint_s,
    )
