"""Cut by fixed counts, under a given cap, or under a tuned cap: the cuts of this program.

Their fields are the keys of `conf/accum/*.yaml`, whose types and ranges are checked with the
config, and those a run adds to them: a tuned cap, a cap lowered by an allocation failure. They are
small, frozen and JSON-able, so that a checkpoint holds them and a resumed run cuts as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NoReturn, Self, final

import numpy as np

from trainer.config.components import Bytes, Count
from trainer.core.coupling import KINDS
from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.plan.cut import Cost, Cut, IntArray, Layout, Plan
from trainer.plan.packing import pack
from trainer.plan.partition import (
    even_starts,
    pad_lengths,
    padded_apart,
    partition,
    reduce_groups,
    samples_of_groups,
    split_at,
)

SHRINK = (7, 10)  # share of the failed size that the next attempt is cut to, as an exact fraction


@final
class SampleTooLongError(DoesNotFitError):
    """One sample alone, at a `position` of the global batch, exceeds the cap of the memory."""

    def __init__(self, position: int, length: int, cap: int) -> None:
        super().__init__(
            f"sample {position} of the global batch has {length} tokens, and memory allows {cap} "
            f"in one micro-batch. Lower data.max_length to {cap} or less"
        )
        self.position, self.length, self.cap = position, length, cap


@final
@dataclass(frozen=True, kw_only=True)
class Fixed(Cut):
    """Equal counts in sample order, as a hand-written loop cuts: `accum=fixed`.

    Ranks hold consecutive samples, their counts differing by at most one (or one group). With
    `micro` the last micro-batch of a rank may be short; with `steps` their sizes differ by at most
    one; with neither, a rank's share is one micro-batch. Each is padded to its own longest sample.
    Where ranks in lockstep have fewer micro-batches, empty slots fill their count.
    """

    couplings = frozenset(KINDS)

    # Samples per micro-batch on one rank; wins over `steps`, with which it agrees on a full global
    # batch (`config.rules.complete_sizes`).
    micro: Count | None = None
    steps: Count | None = None  # micro-batches per rank

    @property
    def for_any_ranks(self) -> LayoutInvariant | None:
        """See the base class; counts of micro-batches are for a number of ranks."""
        return None if self.micro is None else LayoutInvariant(micro=self.micro)

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch in sample order; see `Cut.cut`."""
        size, num_samples = layout.group_size, len(lengths)
        if self.micro is not None and self.micro % size:
            nearest = max(1, round(self.micro / size)) * size
            raise ConfigError(
                f"accum.micro: {self.micro} splits groups of {size} samples that must stay "
                f"together. The nearest valid value is accum.micro={nearest}"
            )
        groups = np.arange(-(-num_samples // size), dtype=np.int64)
        ranks = []
        for share in split_at(groups, even_starts(len(groups), layout.world_size)):
            starts = even_starts(len(share), min(len(share), self.steps or 1))
            if self.micro is not None:
                starts = np.arange(0, len(share), self.micro // size, dtype=np.int64)
            ranks.append(split_at(share, starts))
        if layout.lockstep:
            busiest = max(map(len, ranks))
            ranks = [slots + (groups[:0],) * (busiest - len(slots)) for slots in ranks]
        return padded_apart(samples_of_groups(ranks, size, num_samples), lengths, layout)

    def smaller(self, plan: Plan) -> Fixed | None:
        """Halve the samples per micro-batch; see `Cut.smaller`."""
        largest = max(map(len, chain.from_iterable(plan.ranks)))
        num_groups = -(-largest // plan.group_size)
        if num_groups <= 1:
            return None
        if self.micro is None:
            return replace(self, steps=2 * plan.accum_steps)
        return replace(self, micro=-(-num_groups // 2) * plan.group_size, steps=None)


@final
@dataclass(frozen=True, kw_only=True)
class LayoutInvariant(Cut):
    """Micro-batches that stay the same for every number of ranks: `deterministic=layout`.

    The global batch is cut in sample order first, and its micro-batches are then shared by ranks.
    """

    couplings = frozenset(KINDS)

    micro: int  # samples per micro-batch; the last may be short

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch; see `Cut.cut`."""
        everyone = np.arange(len(lengths), dtype=np.int64)
        pieces = split_at(everyone, np.arange(0, len(lengths), self.micro, dtype=np.int64))
        first = [*even_starts(len(pieces), layout.world_size).tolist(), len(pieces)]
        ranks = [pieces[begin:end] for begin, end in pairwise(first)]
        return padded_apart(ranks, lengths, layout)

    def smaller(self, plan: Plan) -> NoReturn:
        """Refuse: other micro-batches would give other bits."""
        raise DoesNotFitError(
            f"a micro-batch of {self.micro} samples does not fit into memory, and "
            "deterministic=layout fixes the micro-batches: lower accum.micro"
        )


@dataclass(frozen=True, kw_only=True)
class _Capped(Cut):
    """The cheapest cuts under a cap."""

    chooses_sizes = True

    micro: Count | None = None  # most samples of a micro-batch
    # What an allocation failure has lowered the cap to. A single longer sample still gets its try,
    # alone: only the allocator knows.
    cap_after_failure: int | None = None

    @property
    def in_order(self) -> Fixed | None:
        """See the base class."""
        return None if self.micro is None else Fixed(micro=self.micro)

    def smaller(self, plan: Plan) -> Self | None:
        """Lower the cap; see `Cut.smaller`."""
        # Measured on the largest micro-batch that can be cut: a single sample may be larger, and
        # which of the two failed is not known here. So the cap falls with every failure, and after
        # at most `log(cap) / log(10 / 7)` of them each micro-batch is one sample.
        shared = plan.max_shared_positions
        if not shared:
            return None
        return replace(self, cap_after_failure=max(1, shared * SHRINK[0] // SHRINK[1]))

    def _dearest(self, lengths: IntArray, layout: Layout) -> tuple[int, int]:
        """Find the longest sample of the dearest group, and the tokens which that group takes."""
        size = layout.group_size
        if self.micro is not None and self.micro < size:
            raise ConfigError(
                f"accum.micro: {self.micro} is less than a group of {size} samples that must stay "
                f"together. The nearest valid value is accum.micro={size}"
            )
        # Packed rows are rounded up within the cap, and padding keeps the order of lengths.
        if layout.packed:
            needed = reduce_groups(np.add, lengths, size)
        else:
            sizes = np.minimum(size, len(lengths) - np.arange(0, len(lengths), size))
            needed = reduce_groups(np.maximum, pad_lengths(lengths, layout), size) * sizes
        dearest = int(needed.argmax())
        begin = dearest * size
        return begin + int(lengths[begin : begin + size].argmax()), int(needed[dearest])

    def _cheapest(self, lengths: IntArray, layout: Layout, max_tokens: int) -> Plan:
        cap = min(max_tokens, self.cap_after_failure or max_tokens)
        if layout.packed:
            return pack(lengths, layout, cap, self.micro)
        return partition(lengths, layout, cap, self.micro)


@final
@dataclass(frozen=True, kw_only=True)
class Budget(_Capped):
    """The cheapest cuts under a cap that the user gives: `accum=budget`."""

    max_tokens: Count  # most padded tokens of a micro-batch

    @property
    def hard_cap(self) -> int:
        """See the base class."""
        return self.max_tokens

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch at the least cost; see `Cut.cut`."""
        position, needed = self._dearest(lengths, layout)
        if needed > self.max_tokens:
            length = int(lengths[position])
            rounded = "" if needed == length else f", padded to {needed}"
            if layout.group_size > 1:
                rounded = f" in a group of {layout.group_size}, which takes {needed}"
            raise ConfigError(
                f"accum.max_tokens: {self.max_tokens} is less than the longest sample, of {length} "
                f"tokens{rounded}. The nearest valid value is accum.max_tokens={needed}"
            )
        return self._cheapest(lengths, layout, self.max_tokens)


@final
@dataclass(frozen=True, kw_only=True)
class Auto(_Capped):
    """The cheapest cuts under a cap that is found by tuning: `accum=auto`."""

    is_tunable = True

    # Bytes that may be used; `None` is what the device or the process has
    memory: Bytes | None = None
    # Most padded tokens of a micro-batch of several samples; `None` until tuned
    max_tokens: int | None = None
    # Padded tokens up to which a longer sample may form a micro-batch of its own, since memory
    # holds it; `None` allows no more than `max_tokens`
    single_sample_cap: int | None = None
    cost: Cost | None = None  # the time model; the layout's until tuned

    @property
    def hard_cap(self) -> int | None:
        """See the base class."""
        if self.max_tokens is None:
            return None
        return max(self.max_tokens, self.single_sample_cap or 0)

    @property
    def needs_tuning(self) -> bool:
        """Whether its cap is still to be found."""
        return self.max_tokens is None

    def tuned(self, cap: int, cost: Cost, single_sample_cap: int | None = None) -> Auto:
        """Return this cut with the caps and the time model that tuning found."""
        return replace(
            self,
            max_tokens=cap,
            cost=cost,
            single_sample_cap=single_sample_cap,
            cap_after_failure=None,
        )

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch at the least cost; see `Cut.cut`."""
        assert self.max_tokens is not None, "Auto.cut() was called before Auto.tuned()"
        assert self.hard_cap is not None
        layout = replace(layout, cost=self.cost or layout.cost)
        position, needed = self._dearest(lengths, layout)
        if needed > self.hard_cap:
            raise SampleTooLongError(position, int(lengths[position]), self.hard_cap)
        return self._cheapest(lengths, layout, self.max_tokens)
