"""Work out what a sync policy costs a rank: bytes sent per step, and memory while it computes.

With ring collectives: an all-reduce of B bytes over W ranks sends `2 B (W - 1) / W`, an all-gather
or a reduce-scatter half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

# Share of the memory that whole parameters and gradients may take; activations need the rest
MOST_OF_MEMORY = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One row of the table: what a policy costs one rank in a step."""

    policy: str
    within: float  # bytes it sends to those that share one copy of the model
    across: float  # bytes it sends to other copies
    unsharded_bytes: int  # whole parameters and gradients that it has while it computes
    fits: bool  # whether they leave room for activations

    @property
    def sent(self) -> float:
        """Bytes a rank sends per step."""
        return self.within + self.across


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How often a policy moves all parameters or gradients in a step."""

    gathers: float  # of all parameters, within a copy of the model
    reductions: float  # of all gradients, likewise
    across: float  # of all gradients, between copies


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """What sync policies move and hold, whatever they are."""

    mode: str  # where parameters and gradients live: ddp, fsdp or hsdp
    model_bytes: int  # of the gradients; parameters take as much, unless `gathered_bytes` says
    shard: int  # ranks that share one copy of the model; 1 under ddp
    replicas: int  # copies of the model
    limit_bytes: int  # memory of one rank for tensors
    gathered_bytes: int | None = None  # of the parameters as shards gather them; None as they are
    scatters_whole: bool = False  # a reduce-scatter sends what an all-reduce would, as gloo's does


def traffic_of(
    policy: str, collectives: Collectives, sizes: ModelBytes, *, lockstep: bool
) -> Traffic:
    """Work out what one policy costs."""
    shard, size = sizes.shard, sizes.model_bytes
    weights = sizes.gathered_bytes if sizes.gathered_bytes is not None else size
    ring = (shard - 1) / shard
    scattered = collectives.reductions * size
    if sizes.scatters_whole:
        scattered *= 2
    unsharded = weights + size  # whole parameters and gradients
    if lockstep and sizes.mode == "ddp":
        # What is reduced already waits aside, a second gradient.
        unsharded += size
    elif lockstep:
        unsharded = 0
    return Traffic(
        policy=policy,
        within=ring * (collectives.gathers * weights + scattered),
        across=collectives.across * 2 * size / shard * (sizes.replicas - 1) / sizes.replicas,
        unsharded_bytes=unsharded,
        fits=unsharded <= sizes.limit_bytes * MOST_OF_MEMORY,
    )
