"""The order of samples: which ids stand behind each optimizer step.

A pure function of the number of samples (or their lengths), the seed and the global batch. It
knows nothing of ranks, micro-batches, workers or restarts, so none of them can change a step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

import numpy as np

from trainer.core.errors import ConfigError, DataError
from trainer.plan.cut import IntArray


@final
@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the data, between two steps."""

    step: int  # optimizer steps finished
    epoch: int  # epochs finished
    offset: int  # samples of the current epoch already passed
    samples: int  # consumed in total; what `tail=drop` leaves out is not


@final
@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples behind one optimizer step."""

    ids: IntArray  # (global batch,), sample ids in order
    epoch: int  # that they belong to, from 0
    is_tail: bool  # whether the epoch ended before the global batch was full
    after: Cursor  # the position once this step is done


@final
class Order:
    """Cuts the permutation of every epoch into global batches.

    Epoch `e` is the stable argsort of raw Philox draws keyed by `(seed, e)`: a stream that NumPy
    keeps across versions, unlike those of its distributions. A global batch never crosses an
    epoch. One epoch's permutation is in memory at a time: 8 bytes per sample, 16 under
    `unit="tokens"`.

    Args:
        num_samples: samples of the training split.
        seed: selects the permutations.
        global_batch: samples, or tokens, behind one optimizer step; at least 1.
        unit: what `global_batch` counts. With `tokens`, a step closes with the first sample that
            makes the sum reach it.
        tail: what becomes of an epoch's last samples that do not fill a global batch.
        lengths: `(num_samples,)`, tokens of each sample; needed under `unit="tokens"` only.

    Raises:
        ConfigError: `global_batch` is below 1.
        DataError: the data cannot fill a single step.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        global_batch: int,
        unit: Literal["samples", "tokens"] = "samples",
        tail: Literal["keep", "drop"] = "keep",
        lengths: IntArray | None = None,
    ) -> None:
        if global_batch < 1:
            raise ConfigError(f"batch.global={global_batch}: must be at least 1")
        self.num_samples, self.seed, self.global_batch = num_samples, seed, global_batch
        self.keeps_tail = tail == "keep"
        self._lengths = np.asarray(lengths, dtype=np.int64) if unit == "tokens" else None
        # The epoch that is open, its permutation, and the token sums along it.
        self._epoch: tuple[int, IntArray, IntArray] | None = None
        if num_samples < 1:
            raise DataError("data: the training split holds no samples")
        total = num_samples if self._lengths is None else int(self._lengths.sum())
        if not self.keeps_tail and total < global_batch:
            raise DataError(
                f"batch.tail=drop leaves no step: an epoch holds {total} {unit}, fewer than "
                f"batch.global={global_batch}; use batch.tail=keep or a smaller batch.global"
            )

    @property
    def start(self) -> Cursor:
        """The position before the first step."""
        return Cursor(step=0, epoch=0, offset=0, samples=0)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; of every epoch under `unit="samples"`."""
        return self._count_steps(0)

    def next(self, cursor: Cursor) -> GlobalBatch:
        """Take the global batch that follows `cursor`: `start`, or `after` of the batch before.

        A cursor of an order with another `global_batch` is welcome: the epoch goes on from its
        offset. Costs O(global batch), and a sort where it enters another epoch.
        """
        cursor = self._enter(cursor)
        stop, is_tail = self._end_of_batch(cursor.epoch, cursor.offset)
        ids = self._open(cursor.epoch)[0][cursor.offset : stop].copy()
        after = Cursor(cursor.step + 1, cursor.epoch, stop, cursor.samples + len(ids))
        return GlobalBatch(ids=ids, epoch=cursor.epoch, is_tail=is_tail, after=self._enter(after))

    @property
    def most_samples(self) -> int:
        """A bound on the samples of any step of any epoch.

        Under `unit="tokens"` it is what a step of the shortest samples alone would take; sorts.
        """
        count = self.global_batch
        if self._lengths is not None:
            sums = np.cumsum(np.sort(self._lengths))
            count = int(np.searchsorted(sums, self.global_batch)) + 1
        return min(count, self.num_samples)

    def num_steps(self, epochs: int) -> int:
        """Count the steps of the first `epochs` epochs; `unit="tokens"` sorts each of them."""
        if self._lengths is None:
            return epochs * self.steps_per_epoch
        return sum(self._count_steps(epoch) for epoch in range(epochs))

    def fractional_epoch(self, cursor: Cursor) -> float:
        """Express a position in epochs: 1.5 is the middle of the second."""
        return cursor.epoch + cursor.offset / self.num_samples

    def _open(self, number: int) -> tuple[IntArray, IntArray]:
        """Give an epoch's permutation, and its token sums if it has lengths."""
        epoch = self._epoch
        if epoch is None or epoch[0] != number:  # sorts
            permutation = _permutation(self.num_samples, self.seed, number)
            lengths = permutation[:0] if self._lengths is None else self._lengths[permutation]
            epoch = self._epoch = number, permutation, np.cumsum(lengths)
        return epoch[1:]

    def _end_of_batch(self, number: int, offset: int) -> tuple[int, bool]:
        """Find where the batch from `offset` ends, and whether the epoch cuts it short."""
        if self._lengths is None:
            stop = offset + self.global_batch
        else:
            _, sums = self._open(number)
            before = int(sums[offset - 1]) if offset else 0
            stop = int(np.searchsorted(sums, before + self.global_batch)) + 1
        return min(stop, self.num_samples), stop > self.num_samples

    def _enter(self, cursor: Cursor) -> Cursor:
        """Move a position from which its epoch offers no further step to the next epoch."""
        is_over = cursor.offset >= self.num_samples or (
            not self.keeps_tail and self._end_of_batch(cursor.epoch, cursor.offset)[1]
        )
        return Cursor(cursor.step, cursor.epoch + 1, 0, cursor.samples) if is_over else cursor

    def _count_steps(self, number: int) -> int:
        if self._lengths is None:
            full, rest = divmod(self.num_samples, self.global_batch)
            return full + (1 if rest and self.keeps_tail else 0)
        count = offset = 0
        while offset < self.num_samples:
            offset, is_tail = self._end_of_batch(number, offset)
            count += 1 if self.keeps_tail or not is_tail else 0
        return count


def _permutation(num_samples: int, seed: int, epoch: int) -> IntArray:
    digest = hashlib.blake2b(f"{seed}\x1f{epoch}".encode(), digest_size=16, person=b"order")
    stream = np.random.Philox(key=int.from_bytes(digest.digest(), "little"))
    return np.argsort(stream.random_raw(num_samples), kind="stable")
