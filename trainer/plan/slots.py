"""Fills the slots of ranks that meet in every micro-batch.

A slot is one micro-batch of every rank and costs what its dearest costs, so these should be alike:
beside one long sample the other ranks compute several shorter ones. Samples are sorted longest
first throughout; a micro-batch costs as much as if all it holds were as long as its first.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import fsum
from typing import final

import numpy as np

from trainer.plan.cut import FloatArray, IntArray

FILLED_SLOTS = (1, 2, 3, 4, 6, 8, 12, 24)
"""Numbers of slots that consecutive filling aims at; with many slots common cuts are as good."""

SLACK = 1.05
"""Consecutive filling aims this much above the even share, since samples are not divisible."""

LAST_SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
"""Levels at which the last slot is tried, over its even share."""

FALLS = (0.08, 0.03, 0.15)
"""Shares of its level that a slot clears of long samples, so that the next one lies lower."""

MOST_SLOTS = 128
"""Samples of a rank, and so slots, beyond which common cuts are as good and no fall is tried."""

MOST_VISITS = 2**20
"""Samples that all falls together may look at: every slot passes over what is left of them."""

ENDING = 1.5
"""Slots of the present level that what is left would fill, at which levels end."""


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch of every rank.

    Attributes:
        samples: micro-batch after micro-batch, ascending in each.
        starts: `(world_size,)`, where each micro-batch begins among them.
        cost: of the dearest, with what does not depend on its size.
    """

    samples: IntArray
    starts: IntArray
    cost: float


def fill_slots(
    costs: FloatArray, most: IntArray, world_size: int, fixed: float, to_beat: float
) -> list[Slot] | None:
    """Cut sorted samples into slots of micro-batches of like cost.

    Two heuristics, bounded by `to_beat`: see `_fill_evenly` and `_fill_levels`.

    Args:
        costs: `(num_samples,)`, not increasing.
        most: `(num_samples,)`, samples of a micro-batch that begins there, at most.
        world_size: micro-batches of a slot.
        fixed: cost of a micro-batch that does not depend on its size.
        to_beat: total cost of slots that is known to be possible.

    Returns:
        Slots, dearest first, with a sample or more in each micro-batch; `None` if none are
        cheaper, as always where all samples cost the same.
    """
    if costs[0] == costs[-1]:
        return None
    most_slots = -(-len(costs) // world_size)
    tries = MOST_VISITS // (most_slots * len(costs)) if most_slots <= MOST_SLOTS else 0
    best = None
    for fall in FALLS[:tries]:
        bound = _total(best) if best else to_beat
        best = _fill_levels(costs, most, world_size, fixed, bound, fall) or best
    bound = _total(best) if best else to_beat
    best = _fill_evenly(costs, most, world_size, fixed, bound) or best
    return sorted(best, key=lambda slot: -slot.cost) if best else None


def _total(slots: list[Slot]) -> float:
    return fsum(slot.cost for slot in slots)


def _fill_levels(
    costs: FloatArray, most: IntArray, world_size: int, fixed: float, to_beat: float, fall: float
) -> list[Slot] | None:
    """Give each slot the level of the longest sample left, and what fills micro-batches to it.

    At level `T`, micro-batches of `k` samples that cost a little less than `T / k` each waste
    little, whatever `k`. First come those whose samples cost at least `(1 - fall) T`, which fit no
    later slot better; then those that waste the least. What is left in the end is filled evenly.
    One pass over what is left for each slot.
    """
    rest, slots = np.arange(len(costs)), list[Slot]()
    while len(rest):
        remaining = costs[rest]
        before = np.concatenate([[0.0], np.cumsum(remaining)])
        if len(rest) < 2 * world_size or before[-1] <= ENDING * world_size * remaining[0]:
            last = _fill_evenly(remaining, most[rest], world_size, fixed, to_beat - _total(slots))
            if last is None:
                return None
            return slots + [Slot(rest[slot.samples], slot.starts, slot.cost) for slot in last]
        begins, sizes = _whole_groups(remaining, most[rest])
        waste = 1.0 - (before[begins + sizes] - before[begins]) / remaining[0]
        waste[remaining[begins] >= (1.0 - fall) * remaining[0]] = -1.0
        chosen = np.sort(np.argsort(waste, kind="stable")[:world_size])
        if len(chosen) < world_size:
            return None
        begins, sizes = begins[chosen], sizes[chosen]
        starts = np.cumsum(sizes) - sizes
        taken = np.repeat(begins - starts, sizes) + np.arange(sizes.sum())
        dearest = float((sizes * remaining[begins]).max())
        slots.append(Slot(rest[taken], starts, fixed + dearest))
        if _total(slots) >= to_beat:
            return None
        rest = np.delete(rest, taken)
    return slots


def _whole_groups(costs: FloatArray, most: IntArray) -> tuple[IntArray, IntArray]:
    """Group samples as the first one's cost allows: as many of like size as stay below it.

    Returns:
        Where each group begins, and its size; samples left over between two sizes are in none.
    """
    fitting = np.minimum((costs[0] / costs).astype(np.int64), most)
    runs = np.flatnonzero(np.diff(fitting, prepend=0))
    counts = np.diff(runs, append=len(costs)) // fitting[runs]
    sizes = np.repeat(fitting[runs], counts)
    within = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(runs, counts) + within * sizes, sizes


def _fill_evenly(
    costs: FloatArray, most: IntArray, world_size: int, fixed: float, to_beat: float
) -> list[Slot] | None:
    """Fill slots with consecutive micro-batches, each slot with the samples that come next.

    Every rank takes as many of them as cost no more than what the slot would cost if all slots
    shared the work evenly, or than its longest sample. Each number of slots in `FILLED_SLOTS` is
    tried and the best is kept.
    """
    best, work = None, fsum(costs) / world_size
    filler = _Filler([*costs.tolist(), 1.0], [*most.tolist(), 0], world_size)
    # Under `most` there are at least so many slots; aiming at fewer is the same for all of them.
    fewest = fsum(1.0 / most) / world_size
    for count in FILLED_SLOTS[bisect_right(FILLED_SLOTS[1:], fewest) :]:
        starts: list[int] = []
        tops: list[float] = []
        begin, total = 0, 0.0
        while begin < len(costs) and total < to_beat:
            room = max(float(costs[begin]), SLACK * work / count)
            slot, begin, dearest = filler.fill(begin, room)
            starts += slot
            tops.append(fixed + dearest)
            total += tops[-1]
        # A last slot that is not full would leave ranks empty that common cuts keep busy.
        if total < to_beat and starts[-1] < len(costs):
            best, to_beat = (starts, tops), total
    return _slots(*best, world_size, len(costs)) if best else None


def _slots(starts: list[int], tops: list[float], world_size: int, num_samples: int) -> list[Slot]:
    """Turn starts of consecutive micro-batches into slots."""
    bounds = [*starts[::world_size], num_samples]
    rows = np.asarray(starts, dtype=np.int64).reshape(-1, world_size)
    return [
        Slot(np.arange(bounds[turn], bounds[turn + 1]), rows[turn] - bounds[turn], top)
        for turn, top in enumerate(tops)
    ]


@final
@dataclass(frozen=True, slots=True)
class _Filler:
    """Fills slots one by one.

    Attributes:
        costs: as in `fill_slots`, and any positive number behind the last.
        most: as in `fill_slots`, and 0 behind the last.
        world_size: micro-batches of a slot.
    """

    costs: list[float]
    most: list[int]
    world_size: int

    def fill(self, begin: int, room: float) -> tuple[list[int], int, float]:
        """Fill the slot at `begin`, leaving either no sample or one for each rank.

        Returns:
            Its starts, where the next slot begins, and the cost of its dearest micro-batch.
        """
        num_samples, world_size = len(self.costs) - 1, self.world_size
        filled = self._fill(begin, num_samples, room)
        left = num_samples - filled[1]
        if 0 < left < world_size and num_samples - begin >= 2 * world_size:
            return self._fill(begin, num_samples - world_size, room)
        if left:
            return filled
        # The last slot: the lowest level that still takes everything.
        even = fsum(self.costs[begin:num_samples]) / world_size
        for slack in LAST_SLACKS:
            lower = max(self.costs[begin], slack * even)
            tried = self._fill(begin, num_samples, lower) if lower < room else filled
            if tried[1] == num_samples:
                return tried
        return filled

    def _fill(self, begin: int, end: int, room: float) -> tuple[list[int], int, float]:
        # Called a hundred times per global batch: comparisons here cost a third of min and max.
        starts, dearest = [], 0.0
        costs, most = self.costs, self.most
        for left in range(self.world_size - 1, -1, -1):
            starts.append(begin)
            cost = costs[begin]
            size = int(room / cost) or 1
            if size > most[begin]:  # noqa: PLR1730
                size = most[begin]
            # The ranks that come need a sample each.
            if size > end - begin - left:  # noqa: PLR1730
                size = end - begin - left
            if size < 1:
                size = 1 if begin < end else 0
            if size * cost > dearest:  # noqa: PLR1730
                dearest = size * cost
            begin += size
        return starts, begin, dearest
