"""What cost a run more time than it should have, by how much, and what to change: one line each.

A healthy run is told nothing. What is said rests on what was measured while the run trained, and
on what the plan and the network measured at its start had predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import final

from trainer.build.parallel import ParallelSetup
from trainer.core.format import duration, percent, size, slower
from trainer.parallel.sync import SyncPolicy
from trainer.plan.cut import Cost
from trainer.plan.traffic import Traffic
from trainer.report.breakdown import Breakdown, Effort
from trainer.report.environment import num_cores

TOO_MUCH = 0.1
"""Share of a step beyond which a part is worth a word."""

LEAST_SECONDS = 0.5
"""Of a whole run; nobody changes a setting for less."""

SLOWER = 0.05
"""What a rank must be behind the others, at equal work, to be called slow."""

OFF = 1.5
"""Measured over predicted time of the traffic beyond which the network is not what it was."""

SMALL_ENOUGH = 0.05
"""Share of a micro-batch that may be independent of its size."""

LARGER = 2
"""How many times as large micro-batches must become to be worth a word."""


@final
@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run when it ends.

    Attributes:
        breakdown: where the time of a step went.
        efforts: what every rank computed.
        cost: the time model of the cut.
        imbalance: share of the busiest rank's computing that the others wait, by the plan alone.
        num_workers: loading processes per rank.
        parallel: with the table of sync policies and the network as measured.
        fixed_share: of computing, what does not depend on the size of micro-batches; None where
            it is not known.
        cut: the option of `accum`.
        is_tight: whether micro-batches twice as large would not fit into memory.
        device_type: where ranks compute.
    """

    breakdown: Breakdown
    efforts: tuple[Effort, ...]
    cost: Cost
    imbalance: float
    num_workers: int
    parallel: ParallelSetup
    fixed_share: float | None
    cut: str
    is_tight: bool = True
    device_type: str = "cpu"

    def is_much(self, seconds: float) -> bool:
        """Tell whether seconds of the mean step are worth a word."""
        whole = seconds * self.breakdown.steps
        return self.breakdown.share(seconds) > TOO_MUCH and whole > LEAST_SECONDS

    def said(self, seconds: float) -> str:
        """Write seconds of the mean step: `34% of a step (0.12 s)`."""
        return f"{percent(self.breakdown.share(seconds))} of a step ({duration(seconds)})"


def diagnose(facts: Facts) -> tuple[str, ...]:
    """Say what cost more than it should have, the largest first; nothing of a healthy run."""
    found: list[tuple[float, str]] = []
    kinds: tuple[Callable[[Facts], Iterator[tuple[float, str]]], ...] = (
        _data,
        _waiting,
        _sync,
        _fixed,
    )
    for kind in kinds:
        found.extend((seconds, line) for seconds, line in kind(facts) if facts.is_much(seconds))
    return tuple(line for _, line in sorted(found, reverse=True))


def overlap(sync: SyncPolicy, device_type: str) -> str:
    """Say what decides how much of the communication can be hidden."""
    if not sync.lockstep:
        return f"sync={sync.name} reduces when all micro-batches are done"
    if device_type == "cpu":
        return "gloo makes the host wait for every collective"
    return "collectives travel on streams of their own"


def _data(facts: Facts) -> Iterator[tuple[float, str]]:
    """Blame the data for the time they are late, and for those who wait for a rank's.

    Yields:
        Seconds of a step, and a line.
    """
    ranks = facts.breakdown.ranks
    own = [rank.data for rank in ranks]
    late = facts.breakdown.parts["data"] + sum(r.waiting_before for r in ranks) / len(ranks)
    more = f"num_workers={2 * facts.num_workers or min(4, num_cores())}"
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [seconds for rank, seconds in enumerate(own) if rank != slowest]
    if others and own[slowest] > 2 * max(others):
        yield (
            late,
            f"data: {facts.said(late)} is waiting for the samples of rank {slowest}, which take "
            f"{duration(own[slowest])} where those of the others take {duration(max(others))}: "
            f"look at its disk, or type {more} (now {facts.num_workers})",
        )
        return
    yield (
        late,
        f"data: {facts.said(late)} is waiting for samples: {more} loads them in processes beside "
        f"the training (now {facts.num_workers}); if that does not help, reading one is slow",
    )


def _waiting(facts: Facts) -> Iterator[tuple[float, str]]:
    """Say for whom ranks wait, and whether the plan or the machine makes it slow.

    Yields:
        Seconds of a step, and a line.
    """
    ranks = facts.breakdown.ranks
    waited = sum(rank.waiting_after for rank in ranks) / len(ranks)
    by_plan = facts.imbalance * max(rank.compute for rank in ranks)
    what = f"waiting: {facts.said(waited)} ranks wait for the slowest"
    if by_plan > waited / 2:
        remedy = (
            "sync=deferred lets ranks take different numbers of micro-batches"
            if facts.parallel.sync.lockstep
            else "accum=auto deals samples out by what they cost"
            if facts.cut != "auto"
            else "a larger batch.global leaves more to deal out"
        )
        yield (
            waited,
            f"{what}: the cut gives them unequal lengths, {duration(by_plan)} of it by the plan: "
            f"{remedy}",
        )
        return
    slow, behind = _slowest(facts)
    if behind > SLOWER:
        yield (
            waited,
            f"{what}: rank {slow} computes {slower(behind)} the others at equal tokens: its "
            "machine is slower, or something else runs on it: type top there",
        )
        return
    yield (
        waited,
        f"{what}, which is another one from step to step, at equal tokens: something else runs on "
        "their machines in bursts: type top there",
    )


def _slowest(facts: Facts) -> tuple[int, float]:
    """Find the rank that takes longest for the same work, and by how much."""
    ranks = facts.breakdown.ranks
    pace = [
        rank.compute / max(1.0, effort.cost(facts.cost))
        for rank, effort in zip(ranks, facts.efforts, strict=True)
    ]
    slow = max(range(len(pace)), key=pace.__getitem__)
    others = [seconds for rank, seconds in enumerate(pace) if rank != slow]
    usual = median(others) if others else 0.0
    return slow, pace[slow] / usual - 1.0 if usual else 0.0


def _sync(facts: Facts) -> Iterator[tuple[float, str]]:
    """Hold what travelled against what the network could carry.

    Yields:
        Seconds of a step, and a line.
    """
    rows = {row.policy: row for row in facts.parallel.rows}
    row = rows.get(facts.parallel.sync.name)
    seconds = facts.breakdown.parts["sync"]
    if row is None:
        yield seconds, f"sync: {facts.said(seconds)} is spent on reductions"
        return
    inside = ""
    if facts.device_type != "cpu" and facts.parallel.sync.lockstep and row.exposed:
        seconds, inside = row.exposed, " by prediction, inside of compute"
    hidden = facts.breakdown.hidden
    share = "" if hidden is None else f", {percent(hidden)} of its time hidden"
    what = f"sync: {facts.said(seconds)}{inside} is traffic, {size(round(row.sent))} sent{share}"
    yield seconds, f"{what}: {_remedy(facts, row, rows.get('deferred'), seconds)}"


def _remedy(facts: Facts, row: Traffic, deferred: Traffic | None, seconds: float) -> str:
    """Say how there would be less traffic, or why it takes longer than it should."""
    if deferred is not None and row is not deferred and deferred.fits:
        return f"sync=deferred sends {size(round(deferred.sent))}, in one reduction a step"
    if row.seconds and seconds > OFF * row.seconds:
        return (
            f"the network measured at the start would carry that in {duration(row.seconds)}: it "
            "is shared, or the cores that serve it are busy"
        )
    if facts.parallel.mode == "fsdp" and facts.parallel.sync.lockstep:
        return "larger micro-batches gather parameters less often: raise accum.max_tokens"
    return "the network is what it is: a larger batch.global needs it less often"


def _fixed(facts: Facts) -> Iterator[tuple[float, str]]:
    """Say what many small micro-batches cost beside what they hold.

    Yields:
        Seconds of a step, and a line.
    """
    count = max(effort.micro_batches / max(1, effort.steps) for effort in facts.efforts)
    if facts.fixed_share is None or count < LARGER:
        return
    if facts.cut == "auto" and not facts.is_tight:  # it had room, and timed larger ones
        return
    slowest = max(rank.compute for rank in facts.breakdown.ranks)
    if not slowest:  # every step was skipped before it computed
        return
    each = slowest / count
    fixed = each * facts.fixed_share
    per_size = max(each - fixed, each / 100)
    # A micro-batch k times as large takes `fixed + k * per_size`.
    factor = min(count, fixed / per_size * (1 / SMALL_ENOUGH - 1))
    if factor < LARGER:
        return
    saved = fixed * (count - count / factor)
    larger = {"fixed": "accum.micro", "budget": "accum.max_tokens"}.get(facts.cut)
    remedy = "accum=auto finds the size that pays"
    if larger is not None:
        remedy += f", or type an {larger} {factor:.0f} times as large"
    if facts.cut == "auto":
        remedy = "more accum.memory, or activation_checkpointing=true, leaves room for larger ones"
    yield (
        saved,
        f"micro-batches: a rank computes {count:.0f} a step, of {duration(each)} each, of which "
        f"{duration(fixed)} do not depend on their size: larger ones would save "
        f"{facts.said(saved)}: {remedy}",
    )
