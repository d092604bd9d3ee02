"""Look the lengths of samples up where they are asked for, and sum them up once.

Nothing here makes an array of all samples: what describes all of them costs one pass in chunks,
some 10 ns a sample, and nothing where all lengths are one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt

from trainer.plan.cut import IntArray
from trainer.plan.permutation import DRAWN_WHOLE

CHUNK = (
    2**14
)  # samples looked at together; larger arrays leave the cache, and cost four times as much
BINS = 2**16  # of the histogram of lengths


@final
@dataclass(frozen=True, slots=True)
class _Totals:
    """What one pass over all lengths finds."""

    shortest: int = 0
    longest: int = 0
    first_shortest: int = 0
    first_longest: int = 0
    tokens: int = 0
    squares: float = 0.0  # sum over samples of their tokens squared


@final
class Lengths:
    """Tokens of each sample: an array that is looked up, not held; named as NumPy's are.

    Args:
        values: `(values,)`, integers of any width, perhaps memory-mapped, or one number broadcast.
        count: samples; all of `values` by default.
        ids_of: gives the places in `values` of some samples; they are the same by default.
    """

    def __init__(
        self,
        values: npt.NDArray[Any],
        count: int | None = None,
        ids_of: Callable[[IntArray], IntArray] | None = None,
    ) -> None:
        self._values, self._ids_of = values, ids_of
        self._count = len(values) if count is None else count

    @classmethod
    def of(cls, lengths: Lengths | npt.NDArray[Any]) -> Lengths:
        """Give the lengths that an array holds; lengths themselves as they are."""
        return lengths if isinstance(lengths, Lengths) else cls(np.asarray(lengths))

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

    def part(self, within: Callable[[IntArray], IntArray] | None, count: int) -> Lengths:
        """Give the lengths of some of the samples, which `within` names by their place there."""
        outer = self._ids_of
        if within is None or outer is None:
            return Lengths(self._values, count, within or outer)
        return Lengths(self._values, count, lambda places: outer(within(places)))

    def tolist(self) -> list[int]:
        """List all of them, for a few samples."""
        listed: list[int] = self[:].tolist()
        return listed

    def min(self) -> int:
        """Give the shortest length."""
        return self._totals.shortest

    def max(self, initial: int = 0) -> int:
        """Give the longest length; at least `initial`."""
        return max(self._totals.longest, initial)

    def argmin(self) -> int:
        """Give the first of the shortest samples."""
        return self._totals.first_shortest

    def argmax(self) -> int:
        """Give the first of the longest samples."""
        return self._totals.first_longest

    def sum(self) -> int:
        """Count the tokens of all samples."""
        return self._totals.tokens

    def mean(self) -> float:
        """Give the mean length."""
        return self.sum() / self._count

    @property
    def mean_beyond(self) -> float:
        """Tokens by which steps of a target in tokens pass it on average, in a random order.

        That of the sample over a random token, `E[L^2] / 2 E[L] - 1/2` (renewal theory).
        """
        return self._totals.squares / (2.0 * self.sum()) - 0.5

    @property
    def is_constant(self) -> bool:
        """Whether there is a sample, and all have the same length."""
        return bool(self._count) and self.min() == self.max()

    def most_to_reach(self, target: int) -> int:
        """Bound the samples of which any set, less one, has fewer than `target` tokens.

        Exact up to lengths of `BINS`; above, lengths count as the least that shares their bin.
        """
        if self.is_constant:
            return -(-target // self.max())
        shift = max(0, self.max().bit_length() - BINS.bit_length() + 1)
        counts = np.zeros((self.max() >> shift) + 1, dtype=np.int64)
        for _, lengths in self.chunks():
            counts += np.bincount(lengths >> shift, minlength=len(counts))
        least = np.maximum(np.arange(len(counts)) << shift, 1)
        sums = np.cumsum(counts * least)
        last = min(int(np.searchsorted(sums, target)), len(counts) - 1)
        before = int(sums[last] - counts[last] * least[last])
        return int(counts[:last].sum()) - (before - target) // int(least[last])

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
            self.feed(digest.update)
        return digest.hexdigest()

    def feed(self, update: Callable[[bytes], object]) -> None:
        """Give a hash all lengths, as int64, little-endian."""
        for _, lengths in self.chunks():
            update(lengths.astype("<i8", copy=False).tobytes())

    def chunks(self) -> Iterator[tuple[int, IntArray]]:
        """Walk over all lengths: the first sample of a chunk, and the chunk's lengths."""
        for start in range(0, self._count, CHUNK):
            yield start, self[start : start + CHUNK]

    @cached_property
    def _totals(self) -> _Totals:
        if not self._count:
            return _Totals()
        if self._values.strides == (0,):  # one number
            length = int(self._values[0])
            tokens = self._count * length
            return _Totals(length, length, 0, 0, tokens, float(tokens) * length)
        totals = _Totals(shortest=1 << 62)
        for start, lengths in self.chunks():
            low, high, sizes = int(lengths.argmin()), int(lengths.argmax()), lengths.astype(float)
            is_shorter = lengths[low] < totals.shortest
            is_longer = lengths[high] > totals.longest
            totals = _Totals(
                int(lengths[low]) if is_shorter else totals.shortest,
                int(lengths[high]) if is_longer else totals.longest,
                start + low if is_shorter else totals.first_shortest,
                start + high if is_longer else totals.first_longest,
                totals.tokens + int(lengths.sum()),
                totals.squares + float(sizes @ sizes),
            )
        return totals
