"""Name the shapes of micro-batches whose memory counts, and the caps worth asking about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, final

from trainer.plan.cut import Cut, Layout, Plan
from trainer.plan.partition import pad_length


@final
class Shape(NamedTuple):
    """The shape of one micro-batch: `num_samples` rows, each padded to `length` tokens."""

    num_samples: int
    length: int


def largest_shapes(plans: Iterable[Plan]) -> tuple[Shape, ...]:
    """Name the shapes of plans of which one has the highest peak.

    Those with the most positions, with the most pairs, and with the most samples, each of which may
    have a state of its own. A packed row counts as documents of their mean length, rounded up.
    """
    shapes = set[Shape]()
    for plan in plans:
        for rank, slot in plan.slots():
            count = max(1, len(plan.ranks[rank][slot]))
            shapes.add(Shape(count, -(-plan.positions(rank, slot) // count)))
    by_positions = max(shapes, key=lambda shape: (shape.num_samples * shape.length, shape))
    by_pairs = max(shapes, key=lambda shape: (shape.num_samples * shape.length**2, shape))
    return tuple(dict.fromkeys((by_positions, by_pairs, max(shapes))))


def dearest_shapes(
    cut: Cut, plans: Sequence[Plan], layout: Layout, longest: int
) -> tuple[Shape, ...]:
    """Name shapes of which one needs the most memory of the steps that were planned.

    Under counts that were typed it is that of all steps: the longest sample of the data may come
    with a whole micro-batch of others.
    """
    if "micro_batch" not in cut.couplings or layout.packed:
        return largest_shapes(plans)
    most = max(max(map(len, chain.from_iterable(plan.ranks))) for plan in plans)
    return (Shape(most, pad_length(longest, layout)),)


def candidate_caps(longest: int, total: int, ratio: float = 1.04) -> tuple[int, ...]:
    """List the caps worth trying, ascending from one longest sample to the batch in one piece.

    Neighbours differ by at most `ratio` (or by one token), so the largest candidate that fits is
    within `ratio - 1` of the largest cap that fits.
    """
    caps = [longest]
    while caps[-1] < total:
        caps.append(min(total, max(caps[-1] + 1, math.floor(caps[-1] * ratio))))
    return tuple(caps)
