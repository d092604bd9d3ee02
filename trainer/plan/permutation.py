"""Permute whole numbers one at a time: in constant memory, whatever there are of them.

Up to `DRAWN_WHOLE` numbers a permutation is drawn whole, by a sort, and any of the n! may come out.
Beyond, it is a keyed bijection that is evaluated only where it is asked for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from trainer.plan.cut import IntArray

DRAWN_WHOLE = 2**16
ROUNDS = 6

_HIGH = np.uint64(32)


@final
class Bijection:
    """A keyed permutation of `range(count)`, evaluated anywhere at about 0.1 us a number.

    A Feistel network over `x = left * b + right` with `left < a`, `right < b`, `a = b = ceil(sqrt
    n)`, whose rounds add a hash of one half to the other, modulo its size (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). Of the `a b` numbers fewer than one in a hundred lie
    beyond `count`; these are permuted again until they do not.
    """

    def __init__(self, count: int, key: str) -> None:
        self.count = count
        side = math.isqrt(count - 1) + 1
        self._sides = np.uint64(-(-count // side)), np.uint64(side)
        size = 8 * ROUNDS
        digest = hashlib.blake2b(key.encode(), digest_size=size, person=b"bijection").digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, numbers: IntArray) -> IntArray:
        """Give where each of `numbers`, all in `range(count)`, goes; of the same shape."""
        found = self._once(numbers.astype(np.uint64))
        while (beyond := np.flatnonzero(found >= self.count)).size:
            found[beyond] = self._once(found[beyond])
        return found.astype(np.int64)

    def _once(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        halves = [*np.divmod(numbers, self._sides[1])]
        for turn, key in enumerate(self._keys):
            size, one, other = self._sides[turn % 2], turn % 2, 1 - turn % 2
            moved = halves[one] + below(mixed(halves[other] ^ key), size)
            halves[one] = np.where(moved >= size, moved - size, moved)
        found: npt.NDArray[np.uint64] = halves[0] * self._sides[1] + halves[1]
        return found


def drawn_whole(count: int, key: str) -> IntArray:
    """Draw a permutation of `range(count)`: the stable argsort of raw Philox draws.

    A stream that NumPy keeps across versions, unlike those of its distributions. 16 bytes a number.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16, person=b"order")
    stream = np.random.Philox(key=int.from_bytes(digest.digest(), "little"))
    return np.argsort(stream.random_raw(count), kind="stable")


def permutation_of(count: int, key: str) -> Callable[[IntArray], IntArray]:
    """Give what says where each of some numbers of `range(count)` goes."""
    if count > DRAWN_WHOLE:
        return Bijection(count, key)
    return drawn_whole(count, key).take


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash numbers of 64 bits to as many: SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def below(
    draws: npt.NDArray[np.uint64], size: np.uint64 | npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Bring draws of 64 bits below `size`, at most 2^32 (Lemire 2019), without a division."""
    return ((draws >> _HIGH) * size) >> _HIGH
