"""Find how large a micro-batch may be, given a prediction of the peak of any shape."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, final

from trainer.plan.cut import Plan


@final
class Shape(NamedTuple):
    """The shape of one micro-batch: `num_samples` rows, each padded to `length` tokens."""

    num_samples: int
    length: int


def largest_shapes(plans: Iterable[Plan]) -> tuple[Shape, ...]:
    """Name the shapes of plans of which one has the highest peak: most positions, or most pairs.

    A packed row counts as documents of their mean length, rounded up.
    """
    shapes = {
        Shape(count, -(-plan.positions(rank, slot) // count))
        for plan in plans
        for rank, slot in plan.slots()
        for count in (max(1, len(plan.ranks[rank][slot])),)
    }
    by_positions = max(shapes, key=lambda shape: (shape.num_samples * shape.length, shape))
    by_pairs = max(shapes, key=lambda shape: (shape.num_samples * shape.length**2, shape))
    return tuple(dict.fromkeys((by_positions, by_pairs)))


def candidate_caps(longest: int, total: int, ratio: float = 1.04) -> tuple[int, ...]:
    """List the caps worth trying, ascending from one longest sample to the batch in one piece.

    Neighbours differ by at most `ratio` (or by one token), so the largest candidate that fits is
    within `ratio - 1` of the largest cap that fits.
    """
    caps = [longest]
    while caps[-1] < total:
        caps.append(min(total, max(caps[-1] + 1, math.floor(caps[-1] * ratio))))
    return tuple(caps)


MANY = 9 / 8  # what a corner must have of another's samples to be a shape of its own
LINE_STEPS = 4  # predictions placed by interpolation before plain bisection takes over


def corner_shapes(cap: int, longest: int, shortest: int, max_samples: int) -> tuple[Shape, ...]:
    """Name the shapes under `cap` that can have the highest peak.

    For a peak of the form `a + b n L + c n L^2 + d n` (activations, attention scores, per-sample
    state), `n = cap / L` makes it convex in `L`, so its maximum lies at the longest or at the
    shortest length; with at most `max_samples` samples the short end starts at
    `L = cap / max_samples`. Rounded up to whole tokens, that holds the most positions; rounded
    down, the most samples. `longest` and `shortest` are padded lengths of the data.
    """

    def fullest(length: int) -> Shape:
        length = min(longest, max(1, shortest, length))
        return Shape(max(1, min(max_samples, cap // length)), length)

    long, short, many = map(fullest, (longest, math.ceil(cap / max_samples), cap // max_samples))
    corners = (long, short, many) if many.num_samples > MANY * short.num_samples else (long, short)
    return tuple(dict.fromkeys(corners))


def largest_cap(
    predict: Callable[[int], int], limit_bytes: int, candidates: Sequence[int]
) -> int | None:
    """Find the largest candidate cap whose predicted peak fits; None where none does.

    A bisection whose first steps ask where the line through the bracket's ends crosses the limit:
    peaks are nearly affine in the cap, so four or five predictions do. `predict` gives bytes, not
    decreasing; candidates ascend.
    """
    low, high = 0, len(candidates) - 1
    least = predict(candidates[low])
    most = predict(candidates[high]) if high else least
    if least > limit_bytes:
        return None
    if most <= limit_bytes:
        return candidates[high]
    line_steps = LINE_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        if line_steps:
            line_steps -= 1
            start, end = candidates[low], candidates[high]
            crossing = start + (limit_bytes - least) / (most - least) * (end - start)
            middle = min(max(bisect_right(candidates, crossing) - 1, low + 1), high - 1)
        peak = predict(candidates[middle])
        if peak <= limit_bytes:
            low, least = middle, peak
        else:
            high, most = middle, peak
    return candidates[low]
