"""What a sync policy costs: bytes sent per step, and memory held while micro-batches compute.

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
    """

    policy: Policy
    within: float
    across: float
    held: int
    fits: bool


def table(
    mode: Mode,
    *,
    model_bytes: int,
    num_micro_batches: int,
    shard: int,
    replicas: int,
    limit_bytes: int,
) -> tuple[Traffic, ...]:
    """Work out every policy that a parallel mode knows.

    Args:
        mode: where parameters and gradients live.
        model_bytes: of the parameters that are trained; gradients take as much.
        num_micro_batches: of one rank.
        shard: ranks that share one copy of the model; 1 under `ddp`.
        replicas: copies of the model.
        limit_bytes: memory of one rank for tensors.
    """
    times, ring = num_micro_batches, (shard - 1) / shard
    between = 2 * model_bytes / shard * (replicas - 1) / replicas
    whole = 2 * model_bytes
    part = 0 if mode != "ddp" else 2 * whole

    def row(policy: Policy, gathers: float, reductions: float, across: float, held: int) -> Traffic:
        return Traffic(
            policy=policy,
            within=(gathers + reductions) * model_bytes * ring,
            across=across * between,
            held=held,
            fits=held <= limit_bytes * MOST_OF_MEMORY,
        )

    rows = [row("deferred", 1, 1, 1, whole), row("immediate", 2 * times, times, times, part)]
    if mode == "hsdp":
        rows.insert(1, row("hierarchical", 2 * times, times, 1, part))
    return tuple(rows)


def cheapest(rows: Sequence[Traffic]) -> Traffic:
    """Take the row that fits and sends least between copies, then within; the last if none fits."""
    fitting = [row for row in rows if row.fits]
    return min(fitting, key=lambda row: (row.across, row.within)) if fitting else rows[-1]
