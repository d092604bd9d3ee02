"""Cut one global batch into padded micro-batches, for one rank or many.

Samples are sorted by length, longest first, and cut into consecutive groups. For any cost that
grows with the longest sample of a group some optimal partition is of this form: with the group
sizes fixed, regrouping consecutively never raises the j-th largest group maximum. A dynamic
program finds the cheapest cuts.

All functions are pure and deterministic (ties keep sample order; floats are added one by one or
exactly, since numpy's sums depend on the processor), so every rank computes the same plan and
nobody sends it.

Samples that must stay together are groups: `group_size` consecutive samples in sample order. A cut
that respects them is a cut of the groups themselves, each as long as its longest sample.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.plan.cut import Cost, FloatArray, IntArray, Layout, Plan, per_slot

# Lengths among which `ladder` chooses; more would cost time and save no padding to speak of
MAX_CANDIDATES = 256

GPU_MULTIPLE = 8  # tokens; tensor cores take matrices whose sides are multiples of it at full speed


def partition(lengths: IntArray, layout: Layout, cap: int, max_micro: int | None = None) -> Plan:
    """Cut a global batch into padded micro-batches at the least cost.

    One rank, or ranks that wait for each other only at the end of the step: samples go to ranks by
    `deal_by_cost` and each rank is cut by `cut_sorted`, optimal for what it was given; counts may
    differ and a rank may have none. Ranks in lockstep: see `_cut_in_lockstep`.

    Longest first in every rank.

    A micro-batch has at most `cap` padded tokens and `max_micro` samples, for which no group is
    divided; a sample, or a group, beyond the cap is alone. A short last group counts as full.
    """
    size = layout.group_size
    padded = reduce_groups(np.maximum, pad_lengths(lengths, layout), size)
    longest_first = np.argsort(-padded, kind="stable")
    cap, limit = cap // size, max(1, max_micro // size) if max_micro else len(padded)
    # `k` groups of `G` cost `fixed + k G c`, which is `G (fixed / G + k c)`.
    cost = replace(layout.cost, fixed=layout.cost.fixed / size)
    if layout.lockstep and layout.world_size > 1:
        ranks = _cut_in_lockstep(longest_first, padded, layout.world_size, cost, cap, limit)
    else:
        ranks = []
        for share in deal_by_cost(cost.per_sample(padded[longest_first]), layout.world_size):
            own = longest_first[share]
            ranks.append(split_at(own, cut_sorted(padded[own], cap, cost, limit)))
    return padded_apart(samples_of_groups(ranks, size, len(lengths)), lengths, layout)


def reduce_groups(combine: np.ufunc, values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Combine a value of every sample to one of every group, `(groups,)`."""
    return np.asarray(combine.reduceat(values, np.arange(0, len(values), size)))


def samples_of_groups(
    ranks: Sequence[Sequence[IntArray]], group_size: int, num_samples: int
) -> list[list[IntArray]]:
    """List the samples of each slot's groups, group by group; the last of all may be short."""
    if group_size == 1:
        return [*map(list, ranks)]

    def samples(groups: IntArray) -> IntArray:
        # In order, so that the short last group is the last of its micro-batch.
        ids: IntArray = np.sort(groups)[:, None] * group_size + np.arange(group_size)
        return ids[ids < num_samples]

    return [[*map(samples, slots)] for slots in ranks]


def pad_length(length: int, layout: Layout) -> int:
    """Pad one length; see `pad_lengths`."""
    return int(pad_lengths(np.array([length]), layout)[0])


def pad_lengths(lengths: IntArray, layout: Layout) -> IntArray:
    """Round lengths up to 1 at least, and to a shape of the layout; above all, to the multiple."""
    multiple = layout.pad_multiple
    padded: IntArray = -(-np.maximum(lengths, 1) // multiple) * multiple
    if layout.longest is not None:
        padded = np.minimum(padded, np.maximum(lengths, layout.longest))
    if not layout.shapes:
        return padded
    steps = np.asarray(layout.shapes, dtype=np.int64)
    index = np.searchsorted(steps, padded)
    return np.where(index < len(steps), steps[np.minimum(index, len(steps) - 1)], padded)


def padded_apart(
    ranks: Sequence[Sequence[IntArray]], lengths: IntArray, layout: Layout, cap: int | None = None
) -> Plan:
    """Pad each micro-batch to its own longest sample, and packed rows to what the layout allows.

    Rows are rounded up to the multiple, but not beyond a cap; where the layout bounds the number of
    shapes, to one of that many even parts of the cap.
    """
    step, padded = layout.pad_multiple, lengths if layout.packed else pad_lengths(lengths, layout)
    if cap is not None and layout.max_shapes is not None:
        step *= -(-cap // layout.max_shapes // step)
    found = per_slot(np.add if layout.packed else np.maximum, padded, ranks)
    if layout.packed:
        rounded = -(-np.maximum(found, 1) // step) * step
        if cap is not None:  # which a single long document may exceed
            rounded = np.maximum(found, np.minimum(rounded, cap))
        sizes = [*map(len, chain.from_iterable(ranks))]
        found = np.where(sizes, rounded, found)
    lengths_of_slots = iter(found.tolist())
    return Plan(
        ranks=tuple(map(tuple, ranks)),
        lengths=lengths,
        padded_lengths=tuple(tuple(islice(lengths_of_slots, len(slots))) for slots in ranks),
        packed=layout.packed,
        group_size=layout.group_size,
    )


def ladder(lengths: IntArray, max_shapes: int, cost: Cost) -> tuple[int, ...]:
    """Choose the few padded lengths that waste the least.

    A dynamic program over the distinct lengths, `O(max_shapes * m^2)`: exact for `m` up to
    `MAX_CANDIDATES` distinct lengths, otherwise exact over as many evenly ranked ones. Micro-batch
    counts are left out of the cost, since they hardly depend on the shapes. `lengths` are those of
    all data, rounded to their multiple already; the last shape is the longest.
    """
    tops = np.unique(lengths)
    if len(tops) <= max_shapes:
        return tuple(map(int, tops))
    if len(tops) > MAX_CANDIDATES:
        tops = tops[np.linspace(0, len(tops) - 1, MAX_CANDIDATES).astype(np.int64)]
    below = np.searchsorted(np.sort(lengths), np.concatenate([[0], tops]), side="right")
    # waste[i, j]: everything above top i - 1 and up to top j is padded to top j.
    counts = np.maximum(below[None, 1:] - below[:-1, None], 0)
    waste = counts * cost.per_sample(tops)[None, :]
    best, choices = waste[0], []
    for _ in range(max_shapes - 1):
        # best[j]: the least waste up to top j with as many shapes as rounds so far, j the last.
        before = np.concatenate([[0.0], best[:-1]])
        total = np.where(counts > 0, before[:, None] + waste, np.inf)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    # Walk the choices back from the longest, which is always a shape.
    chosen, top = [len(tops) - 1], len(tops) - 1
    for choice in reversed(choices):
        top = int(choice[top]) - 1
        if top < 0:
            break
        chosen.append(top)
    return tuple(int(tops[index]) for index in reversed(chosen))


def cut_sorted(lengths: IntArray, cap: int, cost: Cost, max_micro: int) -> IntArray:
    """Cut samples sorted longest first into consecutive micro-batches at the least total cost.

        V(i) = min over 1 <= k <= K_i of  fixed + k c(s_i) + V(i + k),    V(n) = 0
        c(s) = s + quadratic s^2,    K_i = max(1, min(cap // s_i, max_micro))

    The optimum over all partitions of these samples under cap and `max_micro`, not only over
    consecutive ones. Candidates `j = i + k` are kept in a queue in the order in which they become
    the best, since a nearer one that has become better stays so: `c` only grows towards the front
    and the farther candidate leaves the window first (the cost is Monge). `O(n log n)` for every
    cap, where scanning the window costs `O(n cap / s)`.

    Gives where each micro-batch begins, `(num_micro_batches,)`. Those of one padded length, which
    cost the same however they share their samples, are as even as they can be.
    """
    num_samples = len(lengths)
    if num_samples == 0:
        return np.zeros(0, dtype=np.int64)
    most = np.maximum(1, np.minimum(cap // lengths, max_micro))
    if lengths[0] == lengths[-1]:
        return even_starts(num_samples, -(-num_samples // int(most[0])))
    ends, starts = _cheapest_ends(cost.per_sample(lengths), most, cost.fixed), [0]
    while (end := ends[starts[-1]]) < num_samples:
        starts.append(end)
    return np.asarray(_evened(starts, lengths.tolist()), dtype=np.int64)


def _cheapest_ends(costs: FloatArray, most: IntArray, fixed: float) -> list[int]:
    """Solve the recursion of `cut_sorted`: where a micro-batch that begins at `i` ends."""
    num_samples = len(costs)
    reach = np.arange(num_samples) + most
    last_seen = (np.searchsorted(reach, np.arange(num_samples + 1)) - 1).tolist()
    slopes, ascending = costs.tolist(), (-costs).tolist()
    # Lists, not arrays: each entry is read one by one, which costs ten times as much of an array.
    value, ends = [0.0] * (num_samples + 1), [0] * num_samples
    # turns[x]: the largest i at which candidate queue[x] beats queue[x - 1].
    queue, turns, first = [num_samples], [num_samples], 0
    for i in range(num_samples - 1, -1, -1):
        while first + 1 < len(queue) and turns[first + 1] >= i:
            first += 1
        end = queue[first]
        ends[i] = end
        value[i] = fixed + (end - i) * slopes[i] + value[end]
        # Candidate i is open to micro-batches that begin before it; it takes over from `far` once
        # the slope reaches what it is dearer by, or once `far` is out of reach.
        while True:
            far = queue[-1]
            dearer = (value[i] - value[far]) / (far - i)
            turn = max(last_seen[far], bisect_right(ascending, -dearer) - 1)
            if len(queue) == first + 1 or turn < turns[-1]:
                break
            queue.pop()
            turns.pop()
        queue.append(i)
        turns.append(turn)
    return ends


def _evened(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Share samples evenly among neighbours of one padded length, which costs nothing."""
    evened: list[int] = []
    bounds = [*starts, len(lengths)]
    for _, equal in groupby(starts, key=lengths.__getitem__):
        run = list(equal)
        first = len(evened)
        size, count = bounds[first + len(run)] - run[0], len(run)
        evened += [run[0] + index * size // count for index in range(count)]
    return evened


def even_starts(num_samples: int, num_groups: int) -> IntArray:
    """Begin `num_groups` groups of `num_samples` samples whose sizes differ by at most one."""
    return np.arange(num_groups, dtype=np.int64) * num_samples // num_groups


def deal_by_cost(costs: FloatArray, world_size: int) -> list[IntArray]:
    """Deal sorted samples to ranks of nearly equal totals: longest processing time first.

    The largest total is at most `4/3 - 1/(3 W)` of the best possible on `W` ranks (Graham 1969)
    and at most `mean + (1 - 1/W) max`. Karmarkar-Karp costs ten times as much and is not measurably
    better. Gives each rank's indices, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0.0, rank) for rank in range(world_size)]
    for index, cost in enumerate(costs.tolist()):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + cost, rank))
    return [np.asarray(share, dtype=np.int64) for share in shares]


def deal_in_snake(num_samples: int, world_size: int) -> list[IntArray]:
    """Deal sorted samples to ranks in rows, every other row backwards; gives their indices."""
    rows = np.arange(-(-num_samples // world_size) * world_size).reshape(-1, world_size)
    rows[1::2] = rows[1::2, ::-1]
    return [column[column < num_samples] for column in rows.T]


def _cut_in_lockstep(
    longest_first: IntArray, padded: IntArray, world_size: int, cost: Cost, cap: int, max_micro: int
) -> list[tuple[IntArray, ...]]:
    """Cut ranks so that all have equal counts and little to wait for: each slot costs its slowest.

    Samples are dealt in snake order and all ranks are cut between the same rows; the first sample
    of a row bounds it, so the program of `cut_sorted` over these is optimal among all common cuts
    of the deal. (A last row that is not full can cost more than the program thinks, by what one
    sample is longer than its neighbour.) A slot is empty only where a rank has fewer samples than
    there are slots.
    """
    lengths = padded[longest_first]
    heads = lengths[::world_size].copy()
    if len(heads) > 1 and len(lengths) % world_size:
        # Ranks without a sample in the last row may have to fill a slot from the row before.
        heads[-1] = heads[-2]
    starts = cut_sorted(heads, cap, cost, max_micro)
    ranks = []
    for share in deal_in_snake(len(lengths), world_size):
        # A start moves forward where later slots of this rank would be left without a sample.
        room = np.maximum(len(share) - np.arange(len(starts), 0, -1), np.arange(len(starts)))
        ranks.append(split_at(longest_first[share], np.minimum(starts, room)))
    return ranks


def split_at(samples: IntArray, starts: Sequence[int] | IntArray) -> tuple[IntArray, ...]:
    """Split samples at the given starts, the first 0; empty where starts coincide or lie behind."""
    bounds = [*map(int, starts), len(samples)]
    return tuple(samples[begin:end] for begin, end in pairwise(bounds))


def layout_for(
    lengths: IntArray, *, world_size: int, device_type: str, packed: bool, most_shapes: int | None
) -> Layout:
    """Choose a layout for all training data, whose lengths are `(samples,)`; see `Layout`.

    On a GPU lengths are padded to a multiple of 8 tokens; a compiled model has at most
    `most_shapes` padded lengths, the same for the whole run.
    """
    longest = int(lengths.max())
    # A sample without tokens counts as one, and is not padded to eight.
    multiple = GPU_MULTIPLE if device_type != "cpu" and longest > 1 else 1
    shapes: tuple[int, ...] = ()
    max_shapes = None
    if packed:
        max_shapes = most_shapes
    elif most_shapes is not None:
        padded = pad_lengths(lengths, Layout(pad_multiple=multiple, longest=longest))
        shapes = ladder(padded, most_shapes, Cost())
    return Layout(
        world_size=world_size,
        pad_multiple=multiple,
        longest=longest,
        packed=packed,
        max_shapes=max_shapes,
        shapes=shapes,
    )
