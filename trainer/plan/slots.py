"""Fill the slots of ranks that run in lockstep.

A slot is one micro-batch of every rank and takes as long as its dearest, so all of them should cost
the same: beside one long sample the other ranks compute several shorter ones. Samples are sorted
longest first throughout; a micro-batch costs as much as if all it holds were as long as its first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum
from typing import final

import numpy as np

from trainer.plan.cut import FloatArray, IntArray

# Shares of its level that a slot clears of long samples, so that the next one lies lower
FALLS = (0.08, 0.03, 0.15)
LAST_SLOTS = (1, 2, 3, 4, 6)  # numbers of slots that are tried for what is left in the end
SLACK = 1.05  # what they may cost over an even share, since samples are not divisible
# Samples of a rank, and so slots, beyond which common cuts are as good and nothing is tried
MOST_SLOTS = 128
# Samples that all falls together may look at: every slot passes over what is left of them
MOST_VISITS = 2**20
ENDING = 1.5  # slots of the present level that what is left would fill, at which levels end


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch of every rank."""

    samples: IntArray  # micro-batch after micro-batch, ascending in each
    starts: IntArray  # (world_size,), where each micro-batch begins among them
    cost: float  # of the dearest, with what does not depend on its size


def fill_slots(
    costs: FloatArray, most: IntArray, world_size: int, fixed: float, to_beat: float
) -> list[Slot] | None:
    """Cut sorted samples into slots of `world_size` micro-batches of like cost.

    A heuristic. On lognormal lengths ranks are 0.94 to 0.97 busy, where common cuts keep them 0.87
    to 0.93. `costs` and `most`, `(num_samples,)`, are of each sample and of how many a micro-batch
    that begins there may have; `fixed` comes with every micro-batch. Gives slots, dearest first,
    without an empty micro-batch; None if they cost no less than `to_beat`, which is possible.
    """
    most_slots = -(-len(costs) // world_size)
    if costs[0] == costs[-1] or most_slots > MOST_SLOTS:
        return None
    best: list[Slot] | None = None
    # What ends at its first level is the same for every fall.
    tried = 1 if _is_last(np.cumsum(costs), costs, world_size) else len(FALLS)
    for fall in FALLS[: min(tried, MOST_VISITS // (most_slots * len(costs)))]:
        found = _fill_levels(costs, most, world_size, fixed, to_beat, fall)
        if found:
            best, to_beat = found, fsum(slot.cost for slot in found)
    return sorted(best, key=lambda slot: -slot.cost) if best else None


def _fill_levels(
    costs: FloatArray, most: IntArray, world_size: int, fixed: float, to_beat: float, fall: float
) -> list[Slot] | None:
    """Give each slot the level of the longest sample left, and what fills micro-batches to it.

    At level `T`, micro-batches of `k` samples that cost a little less than `T / k` each waste
    little, whatever `k`. First come those whose samples cost at least `(1 - fall) T`, which fit no
    later slot better; then those that waste the least. What is left in the end is filled evenly.
    """
    rest, slots, total = np.arange(len(costs)), list[Slot](), 0.0
    while len(rest):
        remaining = costs[rest]
        before = np.concatenate([[0.0], np.cumsum(remaining)])
        if _is_last(before, remaining, world_size):
            last = _fill_evenly(remaining, most[rest], world_size, fixed, to_beat - total)
            return last and slots + [Slot(rest[s.samples], s.starts, s.cost) for s in last]
        begins, sizes = _whole_groups(remaining, most[rest])
        waste = 1.0 - (before[begins + sizes] - before[begins]) / remaining[0]
        waste[remaining[begins] >= (1.0 - fall) * remaining[0]] = -1.0
        chosen = np.sort(np.argsort(waste, kind="stable")[:world_size])
        begins, sizes = begins[chosen], sizes[chosen]
        starts = np.cumsum(sizes) - sizes
        taken = np.repeat(begins - starts, sizes) + np.arange(sizes.sum())
        slots.append(Slot(rest[taken], starts, fixed + float((sizes * remaining[begins]).max())))
        total += slots[-1].cost
        if len(chosen) < world_size or total >= to_beat:
            return None
        rest = np.delete(rest, taken)
    return slots


def _is_last(sums: FloatArray, costs: FloatArray, world_size: int) -> bool:
    """Whether what is left is too little for a level; `sums` end with all it costs."""
    return len(costs) < 2 * world_size or bool(sums[-1] <= ENDING * world_size * costs[0])


def _whole_groups(costs: FloatArray, most: IntArray) -> tuple[IntArray, IntArray]:
    """Group samples, as many of like size as stay below the first one's cost: begins and sizes."""
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
    shared the work evenly, or than its longest sample.
    """
    best, work = None, fsum(costs) / world_size
    values, limits = costs.tolist(), most.tolist()  # of which single ones are read faster
    for count in LAST_SLOTS:
        slots, begin, total = list[Slot](), 0, 0.0
        while begin < len(costs) and total < to_beat:
            room = max(values[begin], SLACK * work / count)
            end = len(costs)
            starts, stop, dearest = _fill(values, limits, world_size, (begin, end), room)
            if 0 < end - stop < world_size and end - begin >= 2 * world_size:
                # A slot leaves no sample, or one for each rank.
                bounds = (begin, end - world_size)
                starts, stop, dearest = _fill(values, limits, world_size, bounds, room)
            begins = np.array(starts) - begin
            slots.append(Slot(np.arange(begin, stop), begins, fixed + dearest))
            begin, total = stop, total + fixed + dearest
        # A last slot that is not full would leave ranks empty that common cuts keep busy.
        if total < to_beat and begins[-1] < len(slots[-1].samples):
            best, to_beat = slots, total
    return best


def _fill(
    costs: list[float], most: list[int], world_size: int, bounds: tuple[int, int], room: float
) -> tuple[list[int], int, float]:
    """Fill one slot; gives its starts, where it ends, and the cost of its dearest micro-batch."""
    starts, dearest = [], 0.0
    begin, end = bounds
    for left in range(world_size - 1, -1, -1):
        starts.append(begin)
        if begin < end:
            cost = costs[begin]
            # The ranks that come need a sample each.
            size = max(1, min(int(room / cost) or 1, most[begin], end - begin - left))
            dearest = max(dearest, size * cost)
            begin += size
    return starts, begin, dearest
