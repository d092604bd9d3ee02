"""Work out what a sync policy costs: bytes sent and time per step, memory while computing.

Per rank, with ring collectives: an all-reduce of B bytes over W ranks sends `2 B (W - 1) / W`, an
all-gather or a reduce-scatter half of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

# Share of the memory that whole parameters and gradients may take; activations need the rest
MOST_OF_MEMORY = 0.5
# Share of a micro-batch that is its backward
BACKWARD = 2 / 3
# Bytes of a bucket of small gradients: the least and the most
BUCKETS = 2**23, 2**27
# How many times its latency a bucket travels for at least
LATENCIES = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a collective takes between the ranks of a run; rates are of a ring."""

    ranks: int  # between how many it was measured
    latency_s: float  # of one that sends next to nothing
    all_reduce: float  # bytes per second that a rank sends, as in those below
    all_gather: float
    reduce_scatter: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTime:
    """What one rank computes in a step, as far as its traffic is concerned."""

    micro_batches: float
    seconds: float | None = None  # of a micro-batch's forward and backward; None where not timed
    overlaps: bool = False  # whether the device computes while collectives travel
    overlaps_backward: bool = False  # and its gradients come one by one, in one backward
    scatters_whole: bool = False  # a reduce-scatter sends what an all-reduce would, as gloo's does


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One row of the table: what a policy costs one rank in a step."""

    policy: str
    within: float  # bytes it sends to those that share one copy of the model
    across: float  # bytes it sends to other copies
    unsharded_bytes: int  # whole parameters and gradients that it has while it computes
    fits: bool  # whether they leave room for activations
    seconds: float | None = None  # of its collectives; None where the network was not measured
    exposed: float | None = None  # seconds of them that computing does not hide

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
    needs_whole: bool = False  # it is for whole copies alone, and sends while backward goes on


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """What sync policies move and hold, whatever they are."""

    mode: str  # where parameters and gradients live: ddp, fsdp or hsdp
    model_bytes: int  # of the parameters that are trained; gradients take as much
    shard: int  # ranks that share one copy of the model; 1 under ddp
    replicas: int  # copies of the model
    limit_bytes: int  # memory of one rank for tensors
    groups: int = 1  # parts of the model that are gathered and reduced each on its own
    last_bytes: int = 0  # of the gradients that backward gives last, which travel alone
    gathered_bytes: int | None = None  # of the parameters as shards gather them; None as they are


def row(
    policy: str,
    collectives: Collectives,
    sizes: ModelBytes,
    work: ComputeTime,
    network: Network | None = None,
    *,
    lockstep: bool,
) -> Traffic:
    """Work out what one policy costs; without a network, not its time."""
    shard, size = sizes.shard, sizes.model_bytes
    weights = size if sizes.gathered_bytes is None else sizes.gathered_bytes
    ring = (shard - 1) / shard
    gathered, reduced = collectives.gathers * weights * ring, collectives.reductions * size * ring
    across = collectives.across * 2 * size / shard * (sizes.replicas - 1) / sizes.replicas
    seconds = exposed = None
    if network is not None:
        calls = collectives.gathers + collectives.reductions if shard > 1 else 0
        seconds = (
            (calls + collectives.across) * sizes.groups * network.latency_s
            + gathered / network.all_gather
            + reduced / network.reduce_scatter
            + across / network.all_reduce
        )
        exposed = seconds
        if work.overlaps and lockstep and sizes.mode != "ddp":
            # The first gather and the last reduction of a step have nothing to hide behind; the
            # rest does as far as computing takes as long.
            edges = seconds / max(1.0, work.micro_batches) / max(1, sizes.groups)
            exposed = max(edges, seconds - work.micro_batches * (work.seconds or 0.0))
        if work.overlaps_backward and collectives.needs_whole:
            # All but the last bucket may hide behind the last backward.
            backward = BACKWARD * (work.seconds or 0.0)
            exposed = max(seconds * sizes.last_bytes / size, seconds - backward)
    # Whole parameters and gradients; under ddp what is reduced already waits aside, a second one.
    unsharded = size + weights
    if lockstep:
        unsharded = 3 * size if sizes.mode == "ddp" else 0
    return Traffic(
        policy=policy,
        within=gathered + reduced * (2 if work.scatters_whole else 1),
        across=across,
        unsharded_bytes=unsharded,
        fits=unsharded <= sizes.limit_bytes * MOST_OF_MEMORY,
        seconds=seconds,
        exposed=exposed,
    )


def bucket_bytes(network: Network) -> int:
    """Choose a bucket that travels ten times its latency: a power of two, from 8 to 128 MiB."""
    wanted = max(1.0, LATENCIES * network.latency_s * network.all_reduce)
    least, most = BUCKETS
    return min(most, max(least, 1 << math.ceil(math.log2(wanted))))


def cheapest(rows: Sequence[Traffic], lockstep: Mapping[str, bool]) -> Traffic:
    """Take the row that fits and makes the shortest step.

    A policy in lockstep cannot replay a step that runs out of memory, so it is taken only where no
    other fits. Where the network was not measured, the one that sends least between copies, then
    within, counts; where none fits, the one that needs least memory.
    """
    fitting = [each for each in rows if each.fits]
    if not fitting:
        return min(rows, key=lambda each: each.unsharded_bytes)
    fitting = [each for each in fitting if not lockstep[each.policy]] or fitting
    if any(each.exposed is None for each in fitting):
        return min(fitting, key=lambda each: (each.across, each.within))
    return min(fitting, key=lambda each: each.exposed or 0.0)
