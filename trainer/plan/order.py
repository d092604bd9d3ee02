"""The order of samples: which ids stand behind each optimizer step.

A pure function of the number of samples, their lengths, the seed and the sizes of steps. It
knows nothing of ranks, micro-batches, workers or restarts, so none of them can change a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from trainer.core.errors import ConfigError, DataError
from trainer.core.stateful import Stateful
from trainer.plan.batch_size import BatchSize, Position
from trainer.plan.cut import IntArray
from trainer.plan.lengths import LENGTHS_AT_ONCE, Lengths
from trainer.plan.permutation import DRAWN_WHOLE, permutation_of

FIRST_LOOK = 1024  # samples whose tokens are summed at first, where a step counts tokens


@final
@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the data, between two steps."""

    step: int  # optimizer steps finished
    epoch: int  # epochs finished
    offset: int  # samples of the current epoch already passed
    samples: int  # consumed in total; what `tail=drop` leaves out is not
    # In those and in what was passed over; counted where sizes of steps follow them, else 0
    tokens: int = 0
    passed_steps: int = 0  # that were skipped
    passed: int = 0  # samples of those, which are not consumed


@final
@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples behind one optimizer step."""

    ids: IntArray  # (global batch,), sample ids in order
    epoch: int  # that they belong to, from 0
    size: int  # samples, or tokens, that were asked for
    is_tail: bool  # whether the epoch ended before the global batch was full
    before: Cursor  # the position at which this step begins
    after: Cursor  # the position once this step is done
    passed: IntArray  # sample ids of skipped steps between the step before and this one


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """Steps in a row that have the same size."""

    size: int  # samples, or tokens, of each
    first: Cursor  # the position at which they begin
    end: Cursor  # the position behind them

    @property
    def num_steps(self) -> int:
        """How many they are."""
        return self.end.step - self.first.step


@final
class Order:
    """Cuts the permutation of every epoch into global batches.

    Epoch `e` is permuted by the key `(seed, e)`. A step costs its own samples, in time and in
    memory, wherever in an epoch it is: beyond `DRAWN_WHOLE` samples a `Bijection` gives their ids.
    Up to there the permutation is drawn whole: 8 bytes a sample, and a sort an epoch. A global
    batch never crosses an epoch; `tail` says what becomes of last samples that do not fill one.

    Under `unit="tokens"` a step closes with the first sample that makes the sum reach its size.
    `lengths`, tokens of each sample, are needed there, and where sizes follow tokens.

    With `skips`, sorted ranges of steps, first and last, the steps are those of the order without
    them but for these ranges. A count of steps, as that of an epoch, is without them, too.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        sizes: BatchSize,
        unit: Literal["samples", "tokens"] = "samples",
        tail: Literal["keep", "drop"] = "keep",
        lengths: Lengths | npt.NDArray[Any] | None = None,
        skips: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.num_samples, self.seed, self.sizes, self.skips = num_samples, seed, sizes, skips
        if num_samples < 1:
            raise DataError("data: the training split holds no samples")
        self.size_of(self.start)  # refuses a first size out of range before anything is read
        self.keeps_tail = tail == "keep"
        self._tokens, self._lengths = None, None
        if lengths is not None:
            self._tokens = Lengths.of(lengths)
        if unit == "tokens":
            self._lengths = self._tokens
        # Gives the samples at places of the run, in place of permutations
        self.drawn: Callable[[IntArray], IntArray] | None = None
        # The epoch that is open: its number, and its permutation, drawn or not.
        self._epoch: tuple[int, Callable[[IntArray], IntArray]] | None = None
        if not self.keeps_tail:
            total = num_samples
            if self._lengths is not None:
                total = self._lengths.sum()
            if total < sizes.largest:
                text = f"an epoch holds {total} {unit}, fewer than batch.global={sizes.largest}"
                remedy = "use batch.tail=keep or a smaller batch.global"
                raise DataError(f"batch.tail=drop leaves no step: {text}; {remedy}")

    def position(self, cursor: Cursor) -> Position:
        """Give a position in the words of sizes of steps."""
        steps, samples = cursor.step + cursor.passed_steps, cursor.samples + cursor.passed
        return Position(steps, samples, cursor.tokens, self.fractional_epoch(cursor))

    def size_of(self, cursor: Cursor) -> int:
        """Give the samples, or tokens, behind the step that begins at a cursor."""
        size, largest = self.sizes.size(self.position(cursor)), self.sizes.largest
        if not 1 <= size <= largest:
            text = f"`size` gave {size} for step {cursor.step}; give 1 to `largest`, {largest}"
            raise ConfigError(f"batch.global={largest}: {text}")
        return size

    @property
    def start(self) -> Cursor:
        """The position before the first step."""
        return Cursor(step=0, epoch=0, offset=0, samples=0)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; of every epoch if samples are counted, and as many a step.

        Under `unit="tokens"` and beyond `DRAWN_WHOLE` samples, the number that is expected of a
        random order, some 0.1 % off at most: to count them reads all lengths, in random order.
        """
        lengths = self._lengths
        is_estimated = lengths is not None and self.sizes.is_constant and not lengths.is_constant
        if lengths is None or not is_estimated or self.num_samples <= DRAWN_WHOLE:
            return self._count_epoch(self.start)[0]
        some = lengths[lengths.sample()]
        # A step passes its target by half of the sample over a random token (renewal theory).
        beyond = float(some @ some) / (2.0 * float(some.sum())) - 0.5
        return max(1, round(lengths.sum() / (self.sizes.largest + beyond)))

    def next(self, cursor: Cursor) -> GlobalBatch:
        """Take the global batch that follows `cursor`: `start`, or `after` of the batch before.

        A cursor of an order with other sizes is welcome: the epoch goes on from its offset. Costs
        O(global batch), and a sort where it enters another epoch that is drawn whole.
        """
        at, passed = self._past_skips(self._enter(cursor))
        size = self.size_of(at)
        stop, is_tail = self._end_of_batch(at, size)
        ids, after = self._ids(at.epoch, at.offset, stop), self._enter(self._behind(at, stop))
        return GlobalBatch(ids, at.epoch, size, is_tail, at, after, passed)

    def walk(self, num_steps: int) -> Iterator[Cursor]:
        """Give where each of the first steps begins, and where the last ends; some 5 us each."""
        cursor, _ = self._past_skips(self._enter(self.start))
        for _ in range(num_steps):
            yield cursor
            cursor, _ = self._past_skips(self._after(cursor))
        yield cursor

    def stages(self, num_steps: int) -> tuple[Stage, ...]:
        """Find where the size of the first steps changes.

        None where it never does, or where a run decides on it.
        """
        found = list[Stage]()
        if self.sizes.is_constant or isinstance(self.sizes, Stateful):
            return ()
        first = last = next(self.walk(0))
        for last in self.walk(num_steps):
            if self.size_of(first) != self.size_of(last):
                found.append(Stage(self.size_of(first), first, last))
                first = last
        if first != last:
            found.append(Stage(self.size_of(first), first, last))
        return tuple(found)

    def batch_of(self, size: int) -> IntArray:
        """Take the samples of a step of a size that the first epoch would begin with."""
        return self._ids(0, 0, self._end_of_batch(self.start, size)[0])

    @property
    def most_samples(self) -> int:
        """A bound on the samples of any step of any epoch.

        Under `unit="tokens"` it is what a step of the shortest samples alone would take; beyond
        `DRAWN_WHOLE` samples as if all were as short as the shortest.
        """
        count = self.sizes.largest
        if self._lengths is not None and self.num_samples <= DRAWN_WHOLE and self.drawn is None:
            # The shortest samples first, until their tokens fill a step.
            count = int(np.searchsorted(np.cumsum(np.sort(self._lengths[:])), count)) + 1
        elif self._lengths is not None:
            count = -(-count // self._lengths.min())
        return min(count, self.num_samples)

    def num_steps(self, epochs: int) -> int:
        """Count the steps of the first `epochs` epochs.

        Exactly: under `unit="tokens"` all lengths are read in the order of each epoch, some 0.1 us
        a sample.
        """
        if isinstance(self.sizes, Stateful):
            text = "decides on sizes while it runs, so that epochs give no number of steps"
            raise ConfigError(f"batch: {type(self.sizes).__name__} {text}; type steps=N")
        if self._lengths is None and self.sizes.is_constant:
            return epochs * self.steps_per_epoch
        count, cursor = 0, self.start
        for _ in range(epochs):
            steps, cursor = self._count_epoch(cursor)
            count += steps
        return count

    def fractional_epoch(self, cursor: Cursor) -> float:
        """Express a position in epochs: 1.5 is the middle of the second."""
        return cursor.epoch + cursor.offset / self.num_samples

    def _after(self, cursor: Cursor) -> Cursor:
        """Give where the step that follows the one at a cursor begins."""
        stop, _ = self._end_of_batch(cursor, self.size_of(cursor))
        return self._enter(self._behind(cursor, stop))

    def _behind(self, cursor: Cursor, stop: int) -> Cursor:
        """Give the position behind a step that begins at a cursor and ends at a place."""
        tokens, samples = cursor.tokens, cursor.samples + stop - cursor.offset
        if self.sizes.reads_tokens and self._tokens is not None:
            tokens += int(self._tokens[self._ids(cursor.epoch, cursor.offset, stop)].sum())
        step = cursor.step + 1
        return replace(cursor, step=step, offset=stop, samples=samples, tokens=tokens)

    def _past_skips(self, at: Cursor) -> tuple[Cursor, IntArray]:
        """Go past the steps that are skipped, and give the samples that they would have."""
        found = [np.zeros(0, dtype=np.int64)]
        while any(a <= at.step + at.passed_steps + 1 <= b for a, b in self.skips):
            stop, _ = self._end_of_batch(at, self.size_of(at))
            found.append(self._ids(at.epoch, at.offset, stop))
            count, behind = at.passed + stop - at.offset, self._enter(self._behind(at, stop))
            counts = {"passed_steps": at.passed_steps + 1, "passed": count}
            at = replace(behind, step=at.step, samples=at.samples, **counts)
        return at, np.concatenate(found)

    def _ids(self, number: int, start: int, stop: int) -> IntArray:
        """Give the samples at some places of an epoch's permutation."""
        if self.drawn is not None:
            return self.drawn(number * self.num_samples + np.arange(start, stop))
        if self._epoch is None or self._epoch[0] != number:
            key = f"{self.seed}\x1f{number}"
            self._epoch = number, permutation_of(self.num_samples, key)
        return self._epoch[1](np.arange(start, stop))

    def _end_of_batch(self, cursor: Cursor, size: int) -> tuple[int, bool]:
        """Find where the batch of a size ends, and whether the epoch cuts it short."""
        offset = cursor.offset
        if self._lengths is None:
            stop = offset + size
            return min(stop, self.num_samples), stop > self.num_samples
        # Twice as many lengths are read each time: a step of any size costs at most as much again.
        reached, look = 0, FIRST_LOOK
        while offset < self.num_samples:
            stop = min(offset + look, self.num_samples)
            sums = reached + np.cumsum(self._lengths[self._ids(cursor.epoch, offset, stop)])
            if sums[-1] >= size:
                return offset + int(np.searchsorted(sums, size)) + 1, False
            reached, offset, look = int(sums[-1]), stop, 2 * look
        return self.num_samples, True

    def _enter(self, cursor: Cursor) -> Cursor:
        """Move a position from which its epoch offers no further step to the next epoch."""
        is_over = cursor.offset >= self.num_samples
        if not is_over and not self.keeps_tail:
            _, is_over = self._end_of_batch(cursor, self.size_of(cursor))
        if is_over:
            return replace(cursor, epoch=cursor.epoch + 1, offset=0)
        return cursor

    def _count_epoch(self, cursor: Cursor) -> tuple[int, Cursor]:
        """Count the steps of an epoch that begins at a cursor, and give where the next begins."""
        lengths, size = self._lengths, self.size_of(cursor)
        if not self.sizes.is_constant:
            # A size follows from where its step begins, so that every step is walked over.
            after = self._enter(cursor)
            while after.epoch == cursor.epoch:
                after = self._after(after)
            return after.step - cursor.step, after
        if lengths is None:
            count, rest = divmod(self.num_samples, size)
        elif lengths.is_constant:
            # A step of tokens takes whole samples, so it rounds up.
            count, rest = divmod(self.num_samples, -(-size // lengths.max()))
        else:
            # In chunks, as all lengths at once would take 8 bytes a sample. A step that a chunk
            # does not complete goes on in the next: `rest` are its tokens so far.
            count = rest = 0
            for start in range(0, self.num_samples, LENGTHS_AT_ONCE):
                stop = min(start + LENGTHS_AT_ONCE, self.num_samples)
                sums = rest + np.cumsum(lengths[self._ids(cursor.epoch, start, stop)])
                # Steps end in few of the places, so each end is searched for: O(log chunk).
                begun = 0
                end = int(np.searchsorted(sums, size))
                while end < len(sums):
                    count, begun = count + 1, int(sums[end])
                    end = int(np.searchsorted(sums, begun + size))
                rest = int(sums[-1]) - begun
        if rest and self.keeps_tail:
            count += 1
        return count, replace(cursor, epoch=cursor.epoch + 1)
