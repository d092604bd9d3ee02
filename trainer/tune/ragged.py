"""Find which dimensions of samples follow their length, and which have a length of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self, final

import numpy as np

from trainer.core.micro_batch import Fields
from trainer.plan.cut import IntArray

FIRST_SAMPLES = 16
"""Looked at first; where nothing in them has a length of its own, they are all."""

MOST_SAMPLES = 256
"""Looked at where something has."""

Seen = Sequence[tuple[int, Fields]]
"""Single samples: their tokens, and their collated fields."""


@final
@dataclass(frozen=True, slots=True)
class OwnLength:
    """The most entries of a dimension in any sample up to a length, as far as is known.

    Attributes:
        lengths: of samples, ascending.
        most: entries of any sample up to there.
    """

    lengths: tuple[int, ...]
    most: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], entries: Sequence[int]) -> Self:
        """Gather what samples have."""
        pairs = sorted(zip(lengths, entries, strict=True))
        return cls(tuple(n for n, _ in pairs), tuple(accumulate((m for _, m in pairs), max)))

    def up_to(self, length: int) -> int:
        """Give the most entries of a sample of up to `length` tokens."""
        return self.most[max(0, bisect_right(self.lengths, length) - 1)]


@final
@dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions, but the first, that are not the same in every sample.

    Attributes:
        sequence: by field, those with one entry per token; None where samples of one length
            cannot tell.
        own: by field and dimension, those with a length of their own.
    """

    sequence: Mapping[str, frozenset[int]] | None = None
    own: Mapping[str, Mapping[int, OwnLength]] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: Seen) -> Self:
        """Compare samples; a dimension of features is the same in all of them."""
        lengths = [length for length, _ in seen]
        sequence: dict[str, frozenset[int]] = {}
        own: dict[str, dict[int, OwnLength]] = {}
        for name in set.intersection(*(set(fields) for _, fields in seen)):
            shapes = [tuple(fields[name].shape) for _, fields in seen]
            sizes = [list(each) for each in zip(*shapes, strict=False)]
            follows = {dim for dim, found in enumerate(sizes) if dim and found == lengths}
            sequence[name] = frozenset(follows)
            own[name] = {
                dim: OwnLength.of(lengths, found)
                for dim, found in enumerate(sizes)
                if dim and dim not in follows and len(set(found)) > 1
            }
        differ = len(set(lengths)) > 1
        return cls(sequence if differ else None, {n: dims for n, dims in own.items() if dims})


def look(lengths: IntArray, load: Callable[[int], Fields | None]) -> Dims:
    """Look at samples of every length: at a few, and at more where these have lengths of their own.

    Args:
        lengths: `(samples,)`, of all data.
        load: gives one sample, collated alone; None where it cannot be read.
    """
    ascending = lengths.argsort(kind="stable")
    dims = Dims()
    for most in (FIRST_SAMPLES, MOST_SAMPLES):
        places = np.unique(np.linspace(0, len(ascending) - 1, most).round().astype(np.int64))
        ids = [int(ascending[place]) for place in places]
        seen = [(int(lengths[i]), fields) for i in ids if (fields := load(i)) is not None]
        dims = Dims.of(seen) if seen else dims
        if not dims.own:
            break
    return dims
