"""Look the lengths of samples up where they are asked for, and sum them up once.

Nothing here makes an array of all samples: what describes all of them costs one pass in chunks,
some 15 ns a sample, and nothing where all lengths are one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from trainer.plan.cut import IntArray
from trainer.plan.permutation import DRAWN_WHOLE

# Samples looked at together; more leave the processor's cache, and cost four times as much.
LENGTHS_AT_ONCE = 2**14

IdsOf = Callable[[IntArray], IntArray]
"""Turns places in a part of something into places in all of it."""


def picked(listed: IntArray, places: IntArray) -> IntArray:
    """Give what is listed at some places."""
    found: IntArray = listed[places]
    return found


def _in_turn(first: IdsOf, second: IdsOf, places: IntArray) -> IntArray:
    return second(first(places))


@final
class Lengths:
    """Tokens of each sample: an array that is looked up, not held; named as NumPy's are.

    `ids_of` gives the places in `values` of some samples; they are the same by default.
    """

    def __init__(
        self, values: npt.NDArray[Any], count: int | None = None, ids_of: IdsOf | None = None
    ) -> None:
        self._values, self._ids_of = values, ids_of
        self._count = len(values) if count is None else count

    @classmethod
    def of(cls, lengths: Lengths | npt.NDArray[Any]) -> Lengths:
        """Give the lengths that an array holds; lengths themselves as they are."""
        return lengths if isinstance(lengths, Lengths) else cls(np.asarray(lengths))

    def part(self, ids_of: IdsOf | None, count: int) -> Lengths:
        """Give the lengths of some of the samples."""
        outer = self._ids_of
        if ids_of is None or outer is None:
            return Lengths(self._values, count, ids_of or outer)
        return Lengths(self._values, count, partial(_in_turn, ids_of, outer))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: Any) -> Any:  # noqa: ANN401 - as arrays are indexed
        """Look lengths up by a number, a slice, or an array of numbers; int64."""
        if isinstance(where, slice):
            where = np.arange(*where.indices(self._count))
        places = np.atleast_1d(where)
        found = self._values[places if self._ids_of is None else self._ids_of(places)]
        lengths = np.asarray(found, dtype=np.int64)
        return lengths if np.ndim(where) else lengths[0]

    def min(self) -> int:
        """Give the shortest length."""
        return self._totals[0][0]

    def max(self, initial: int = 0) -> int:
        """Give the longest length; at least `initial`."""
        return max(-self._totals[1][0], initial)

    def argmin(self) -> int:
        """Give the first of the shortest samples."""
        return self._totals[0][1]

    def argmax(self) -> int:
        """Give the first of the longest samples."""
        return self._totals[1][1]

    def sum(self) -> int:
        """Count the tokens of all samples."""
        return self._totals[2]

    def mean(self) -> float:
        """Give the mean length."""
        return self.sum() / self._count

    @property
    def is_constant(self) -> bool:
        """Whether all samples have the same length."""
        return self.min() == self.max()

    def sample(self) -> IntArray:
        """Give samples that stand for all, ascending: all of a few, else at even distances.

        The first of the shortest and of the longest are among them.
        """
        if self._count <= DRAWN_WHOLE:
            return np.arange(self._count)
        even = np.linspace(0, self._count - 1, DRAWN_WHOLE, dtype=np.int64)
        return np.union1d(even, [self.argmin(), self.argmax()])

    @cached_property
    def digest(self) -> str:
        """Hash all lengths, a gigabyte of int64 a second; of equal ones their number and length."""
        digest = hashlib.blake2b(f"{self._count}|".encode(), digest_size=16)
        if self.is_constant:
            digest.update(str(self.min()).encode())
        else:
            for _, lengths in self._chunks():
                digest.update(lengths.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    def _chunks(self) -> Iterator[tuple[int, IntArray]]:
        for start in range(0, self._count, LENGTHS_AT_ONCE):
            yield start, self[start : start + LENGTHS_AT_ONCE]

    @cached_property
    def _totals(self) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Find the shortest length and its first sample, likewise the longest, negated; the sum."""
        if not self._count:
            return (0, 0), (0, 0), 0
        # One number that is repeated in no memory.
        if self._values.strides == (0,):
            length = int(self._values[0])
            return (length, 0), (-length, 0), self._count * length
        low, high, tokens = (1 << 62, 0), (0, 0), 0
        for start, lengths in self._chunks():
            low = min(low, (int(lengths.min()), start + int(lengths.argmin())))
            high = min(high, (-int(lengths.max()), start + int(lengths.argmax())))
            tokens += int(lengths.sum())
        return low, high, tokens
