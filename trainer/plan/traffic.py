"""What a sync policy costs: bytes sent and time per step, and memory held while computing.

Per rank, with ring collectives: an all-reduce of B bytes over W ranks sends `2 B (W - 1) / W`, an
all-gather or a reduce-scatter half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

Mode = Literal["ddp", "fsdp", "hsdp"]
Policy = Literal["deferred", "immediate", "hierarchical"]

MOST_OF_MEMORY = 0.5
"""Share of the memory that whole parameters and gradients may take; activations need the rest."""

WORTH_LOCKSTEP = 0.95
"""What another policy's step must take, of a deferred one's, to be preferred.

Deferred steps can be replayed when memory runs out, and let ranks differ in their counts.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a collective takes between the ranks of a run.

    Attributes:
        ranks: between how many it was measured.
        latency_s: of one that sends next to nothing.
        all_reduce: bytes per second that a rank sends in one, if it goes round a ring.
        all_gather: likewise.
        reduce_scatter: likewise.
        shard: ranks that share one copy of the model, where there are several copies: gathers and
            scatters were measured among these, all-reduces between the copies.
        across_latency_s: of an all-reduce between copies; None where there is one latency.
    """

    ranks: int
    latency_s: float
    all_reduce: float
    all_gather: float
    reduce_scatter: float
    shard: int | None = None
    across_latency_s: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank computes in a step, as far as its traffic is concerned.

    Attributes:
        micro_batches: of one rank.
        seconds: of one micro-batch's forward and backward; None where nothing was timed.
        groups: parts of the model that are gathered and reduced each on its own.
        overlaps: whether the device computes while collectives travel.
        scatters_whole: a reduce-scatter sends as much as an all-reduce would, as gloo's does.
    """

    micro_batches: float
    seconds: float | None = None
    groups: int = 1
    overlaps: bool = False
    scatters_whole: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One row of the table.

    Attributes:
        policy: of which it tells.
        within: bytes a rank sends per step to those that share one copy of the model.
        across: bytes it sends to other copies.
        held: bytes of whole parameters and gradients it holds while it computes.
        fits: whether they leave room for activations.
        seconds: its collectives take per step; None where the network was not measured.
        exposed: seconds of them that computing does not hide.
    """

    policy: Policy
    within: float
    across: float
    held: int
    fits: bool
    seconds: float | None = None
    exposed: float | None = None

    @property
    def sent(self) -> float:
        """Bytes a rank sends per step."""
        return self.within + self.across


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """How often a policy moves all parameters or gradients in a step."""

    gathers: float
    reductions: float
    across: float


def table(
    mode: Mode,
    *,
    model_bytes: int,
    shard: int,
    replicas: int,
    limit_bytes: int,
    work: Work,
    network: Network | None = None,
) -> tuple[Traffic, ...]:
    """Work out every policy that a parallel mode knows, the one that sends least first.

    Args:
        mode: where parameters and gradients live.
        model_bytes: of the parameters that are trained; gradients take as much.
        shard: ranks that share one copy of the model; 1 under `ddp`.
        replicas: copies of the model.
        limit_bytes: memory of one rank for tensors.
        work: what a rank computes.
        network: what it sends over.
    """
    count, ring = work.micro_batches, (shard - 1) / shard
    between = 2 * model_bytes / shard * (replicas - 1) / replicas
    # Under ddp what is reduced already waits aside, a second gradient.
    window, lockstep = 2 * model_bytes, 3 * model_bytes if mode == "ddp" else 0

    def row(policy: Policy, times: _Times, held: int) -> Traffic:
        gathered, reduced = (n * model_bytes * ring for n in (times.gathers, times.reductions))
        across = times.across * between
        seconds = exposed = None
        if network is not None:
            calls = times.gathers + times.reductions if shard > 1 else 0
            across_s = network.across_latency_s or network.latency_s
            seconds = (
                calls * work.groups * network.latency_s
                + times.across * work.groups * across_s
                + gathered / network.all_gather
                + reduced / network.reduce_scatter
                + across / network.all_reduce
            )
            hides = work.overlaps and policy != "deferred" and mode != "ddp"
            exposed = _exposed(seconds, work) if hides else seconds
        return Traffic(
            policy=policy,
            within=gathered + reduced * (2 if work.scatters_whole else 1),
            across=across,
            held=held,
            fits=held <= limit_bytes * MOST_OF_MEMORY,
            seconds=seconds,
            exposed=exposed,
        )

    rows = [
        row("deferred", _Times(gathers=1, reductions=1, across=1), window),
        row("immediate", _Times(gathers=2 * count, reductions=count, across=count), lockstep),
    ]
    if mode == "hsdp":
        times = _Times(gathers=2 * count, reductions=count, across=1)
        rows.insert(1, row("hierarchical", times, lockstep))
    return tuple(rows)


def _exposed(seconds: float, work: Work) -> float:
    """Tell how much of a lockstep policy's traffic computing cannot hide.

    The first gather and the last reduction of a step have nothing to hide behind; the rest does as
    far as computing takes as long.
    """
    edges = seconds / max(1.0, work.micro_batches) / max(1, work.groups)
    return max(edges, seconds - work.micro_batches * (work.seconds or 0.0))


def cheapest(rows: Sequence[Traffic], work: Work) -> Traffic:
    """Take the row that fits and makes the shortest step, deferred in case of doubt.

    Where the network was not measured, it is the one that sends least between copies, then within.
    Where none fits, it is the one that holds least.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return min(rows, key=lambda row: row.held)
    if any(row.exposed is None for row in fitting):
        return min(fitting, key=lambda row: (row.across, row.within))
    computing = work.micro_batches * (work.seconds or 0.0)
    took = [computing + (row.exposed or 0.0) for row in fitting]
    best = min(range(len(fitting)), key=took.__getitem__)
    first = fitting[0]
    doubtful = first.policy == "deferred" and took[best] > took[0] * WORTH_LOCKSTEP
    return first if doubtful else fitting[best]
