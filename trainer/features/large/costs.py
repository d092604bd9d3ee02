"""Work out what a number of ranks costs: steps, the start, checkpoints. Numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from trainer.core.world import stage_sizes

ORIGIN = "measured on 2 to 64 gloo processes of one machine, and extrapolated"
# By `benchmarks/ranks.py`, on two cores that had other work: the time times the cores, over all
# messages of all ranks, 0.25 to 0.37 ms at each number of ranks
MESSAGE_S = 3e-4
# Likewise over the ranks, until all have joined: 0.12, 0.42 and 0.63 s a rank of 16, 32 and 64; a
# rank of its own core connects to each other one
JOIN_S, JOIN_PAIR_S = 0.05, 0.009
VECTORS = 3  # that hosts agree on in a step: weights, what came out, whether to stop or save
GATHERS = 12  # texts that ranks gather of each other until the first step


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
    """Give what agreement adds to a step: in each stage a message passes its ranks twice."""
    messages = sum(2 * (size - 1) for size in stage_sizes(ranks))
    return VECTORS * MESSAGE_S * messages


def estimate(
    *,
    ranks: int,
    compute_s: float | None,
    sent: float,
    network: float | None,
    overlaps: bool,
    state_bytes: float,
    storage: float | None,
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
    """
    network_s, agree_s, step_s, bound = None, agree_seconds(ranks), None, None
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
        # A gathering passes all ranks twice, first for its size.
        gather_s=GATHERS * MESSAGE_S * 2 * (ranks - 1),
        checkpoint_s=storage and state_bytes / storage,
    )
