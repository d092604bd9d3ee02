"""Pack the documents of one global batch into rows, end to end, without padding.

For models that take document boundaries. Bin packing under a hard cap comes first, balance
second: number partitioning alone exceeds the cap.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.plan import partition
from trainer.plan.cut import FloatArray, IntArray, Layout, Plan

TRIES_PER_DOCUMENT = 1  # rows passed over for each document, on average, before balancing gives up


def pack(lengths: IntArray, layout: Layout, cap: int, max_micro: int | None = None) -> Plan:
    """Cut a global batch into packed rows, each one micro-batch.

    Ranks that wait for each other only at the end of the step: documents go to ranks by cost, each
    rank is packed on its own. Ranks in lockstep: the batch is packed into a multiple of
    `world_size` rows, and rows of like cost share a slot, which minimises the sum of the slots'
    maxima for given rows. Groups of samples that must stay together are packed as one document.

    A row has at most `cap` positions and `max_micro` documents; a longer document is alone.
    """
    size = layout.group_size
    counted = np.maximum(lengths, 1)
    totals = partition.reduce_groups(np.add, counted, size)
    order = np.argsort(-totals, kind="stable")
    # Attention pays document by document.
    costs = partition.reduce_groups(np.add, layout.cost.per_sample(counted), size)[order]
    limit = max(1, max_micro // size) if max_micro else len(totals)
    if layout.lockstep:
        rows = pack_rows(totals[order], costs, cap, limit, multiple_of=layout.world_size)
        shares = partition.deal_in_snake(len(rows), layout.world_size)
        ranks = [[order[rows[index]] for index in share] for share in shares]
    else:
        ranks = []
        dearest_first = np.argsort(-costs, kind="stable")
        for share in partition.deal_by_cost(costs[dearest_first], layout.world_size):
            mine = np.sort(dearest_first[share])
            rows = pack_rows(totals[order[mine]], costs[mine], cap, limit)
            ranks.append([order[mine[row]] for row in rows])
    samples = partition.samples_of_groups(ranks, size, len(lengths))
    return partition.padded_apart(samples, lengths, replace(layout, packed=True), cap)


def pack_rows(
    lengths: IntArray, costs: FloatArray, cap: int, max_micro: int, multiple_of: int = 1
) -> list[IntArray]:
    """Pack documents sorted longest first into rows of at most `cap` tokens, nearly equal in cost.

    The number of rows is that of best fit decreasing, rounded up to the multiple: at most
    `11/9 OPT + 4` (Johnson 1974; usually the lower bound `ceil(sum / cap)`) where `max_micro` does
    not bind. Into as many rows the documents are dealt again, each to the cheapest row that has
    room; where that fails, the rows of best fit stay. `O(n log n)`.

    Gives rows of indices, ascending in each, dearest row first and empty rows last.
    """
    rows = _best_fit(lengths.tolist(), cap, max_micro)
    if not rows:
        return []
    count = -(-len(rows) // multiple_of) * multiple_of
    balanced = _balanced(lengths.tolist(), costs.tolist(), cap, max_micro, count)
    packed = [np.array(row, dtype=np.int64) for row in balanced or _halved(rows, count)]
    sizes = np.array([*map(len, packed)])
    # Sums of all rows at once: a difference of two of them is what one row costs.
    sums = np.concatenate([[0.0], np.cumsum(costs[np.concatenate(packed)])])
    ends = np.cumsum(sizes)
    dearest_first = np.argsort(sums[ends - sizes] - sums[ends], kind="stable")
    return [packed[index] for index in dearest_first]


def _best_fit(lengths: Sequence[int], cap: int, max_micro: int) -> list[list[int]]:
    """Put each document into the fullest row that has room for it (best fit decreasing)."""
    rows, smallest = list[list[int]](), min(lengths, default=0)
    open_rows: list[tuple[int, int]] = []  # room and row, sorted
    for index, length in enumerate(lengths):
        at = bisect_left(open_rows, (length, 0))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            rows[row].append(index)
        else:
            room, row = cap, len(rows)
            rows.append([index])
        # A row with no room for the shortest document is never looked at again.
        if room - length >= smallest and len(rows[row]) < max_micro:
            insort(open_rows, (room - length, row))
    return rows


def _balanced(
    lengths: Sequence[int], costs: Sequence[float], cap: int, max_micro: int, count: int
) -> list[list[int]] | None:
    """Deal documents to `count` rows, each to the cheapest with room; None if that takes long."""
    rows: list[list[int]] = [[] for _ in range(count)]
    rooms = [cap] * count
    loads = [(0.0, row) for row in range(count)]
    tries, smallest = TRIES_PER_DOCUMENT * len(lengths), min(lengths, default=0)
    for index, length in enumerate(lengths):
        passed = []
        # An empty row takes a document of any length, alone.
        while loads and length > rooms[loads[0][1]] and rows[loads[0][1]]:
            passed.append(heapq.heappop(loads))
            tries -= 1
        if not loads or tries < 0:
            return None
        load, row = heapq.heappop(loads)
        rows[row].append(index)
        rooms[row] -= length
        if rooms[row] >= smallest and len(rows[row]) < max_micro:
            heapq.heappush(loads, (load + costs[index], row))
        for entry in passed:
            heapq.heappush(loads, entry)
    return rows


def _halved(rows: list[list[int]], count: int) -> list[list[int]]:
    """Split the rows with the most documents until there are `count`, or only single ones."""
    fullest = [(-len(row), row) for row in rows]
    heapq.heapify(fullest)
    while len(fullest) < count and -fullest[0][0] > 1:
        _, row = heapq.heappop(fullest)
        for half in (row[::2], row[1::2]):
            heapq.heappush(fullest, (-len(half), half))
    return [row for _, row in fullest] + [[] for _ in range(count - len(fullest))]
