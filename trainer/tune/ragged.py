"""Find which dimensions of samples follow their length, and which have a length of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

import numpy as np

from trainer.core.micro_batch import Fields
from trainer.plan.cut import IntArray

SAMPLES = (16, 256)  # looked at first, and where something in them has a length of its own
Dim = tuple[str, int]
"""A field's name, and which of its dimensions."""


@final
@dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions, but the first, that are not the same in every sample.

    Attributes:
        sequence: those with one entry per token; None where samples of one length cannot tell.
        own: those with a length of their own: lengths of samples, ascending, and the most entries
            of any sample up to each.
    """

    sequence: frozenset[Dim] | None = None
    own: Mapping[Dim, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)

    def own_length(self, dim: Dim, length: int) -> int | None:
        """Give the most entries that a sample of up to `length` tokens has; None if it has none."""
        if dim not in self.own:
            return None
        lengths, most = self.own[dim]
        return most[max(0, bisect_right(lengths, length) - 1)]


def look(lengths: IntArray, load: Callable[[int], Fields | None]) -> Dims:
    """Look at samples of every length: at a few, and at more where these have lengths of their own.

    Args:
        lengths: `(samples,)`, of all data.
        load: gives one sample, collated alone; None where it cannot be read.
    """
    ascending = lengths.argsort(kind="stable")
    dims = Dims()
    for most in SAMPLES:
        places = np.unique(np.linspace(0, len(ascending) - 1, most).round().astype(np.int64))
        ids = ascending[places].tolist()
        seen = [(int(lengths[i]), fields) for i in ids if (fields := load(i)) is not None]
        dims = _compare(seen) if seen else dims
        if not dims.own:
            break
    return dims


def _compare(seen: Sequence[tuple[int, Fields]]) -> Dims:
    """Compare samples, the shortest first; a dimension of features is the same in all of them."""
    lengths = tuple(length for length, _ in seen)
    sequence, own = set[Dim](), dict[Dim, tuple[Sequence[int], Sequence[int]]]()
    for name in sorted(set.intersection(*(set(fields) for _, fields in seen))):
        shapes = [tuple(fields[name].shape) for _, fields in seen]
        for dim, sizes in enumerate(zip(*shapes, strict=False)):
            if dim and sizes == lengths:
                sequence.add((name, dim))
            elif dim and len(set(sizes)) > 1:
                own[name, dim] = lengths, tuple(accumulate(sizes, max))
    return Dims(frozenset(sequence) if len(set(lengths)) > 1 else None, own)
