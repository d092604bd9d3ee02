"""The cuts that come with the program: fixed counts, a given cap, a tuned cap.

Their fields are the keys of `conf/accum/*.yaml`, and those a run adds to them: a tuned cap, a cap
lowered by an allocation failure. They are small, frozen and JSON-able, so that a checkpoint holds
them and a resumed run cuts as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from trainer.core.errors import ConfigError, DoesNotFitError
from trainer.plan.cut import Cost, Cut, IntArray, Layout, Plan
from trainer.plan.groups import longest_of_groups, samples_of_groups, totals_of_groups
from trainer.plan.packing import pack
from trainer.plan.partition import even_starts, pad, padded_apart, partition, split, with_shapes

SHRINK = (7, 10)
"""Share of the failed size that the next attempt is cut to, as an exact fraction."""


@final
class SampleTooLongError(DoesNotFitError):
    """One sample alone exceeds the cap that the memory allows.

    Attributes:
        position: of the sample in the global batch, from 0.
        length: tokens of the sample.
        cap: most padded tokens of a micro-batch.
    """

    def __init__(self, position: int, length: int, cap: int) -> None:
        super().__init__(
            f"sample {position} of the global batch has {length} tokens, and memory allows {cap} "
            f"in one micro-batch. Lower data.max_length to {cap} or less"
        )
        self.position = position
        self.length = length
        self.cap = cap


@final
@dataclass(frozen=True, kw_only=True)
class Fixed(Cut):
    """Equal counts in sample order, as a hand-written loop cuts: `accum=fixed`.

    Ranks hold consecutive samples, their counts differing by at most one (or by one group, where
    samples form groups). With `micro` the last micro-batch of a rank may be short; with `steps`
    their sizes differ by at most one; with neither, a rank's share is one micro-batch. Each is
    padded to its own longest sample. Where
    ranks run in lockstep and one has fewer micro-batches, empty slots fill its count.

    Attributes:
        micro: samples per micro-batch on one rank; wins over `steps`, with which it agrees on a
            full global batch (`config.sizes.complete_sizes`).
        steps: micro-batches per rank.
    """

    keeps_order: ClassVar[bool] = True

    micro: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        _require_sizes(micro=self.micro, steps=self.steps)

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch in sample order; see `Cut.cut`."""
        size, num_samples = layout.group_size, len(lengths)
        groups = np.arange(-(-num_samples // size), dtype=np.int64)
        shares = split(groups, even_starts(len(groups), layout.world_size))
        micro = self._groups_per_micro_batch(size)
        ranks = [
            split(share, self._starts(len(share), micro)) if len(share) else () for share in shares
        ]
        if layout.lockstep:
            busiest = max(len(slots) for slots in ranks)
            ranks = [slots + (groups[:0],) * (busiest - len(slots)) for slots in ranks]
        samples = tuple(
            tuple(samples_of_groups(slot, size, num_samples) for slot in slots) for slots in ranks
        )
        return padded_apart(samples, lengths, layout)

    def smaller(self, plan: Plan) -> Fixed | None:
        """Halve the samples per micro-batch; see `Cut.smaller`."""
        largest = max((len(plan.ranks[rank][slot]) for rank, slot in plan.slots()), default=0)
        num_groups = -(-largest // plan.group_size)
        if num_groups <= 1:
            return None
        if self.micro is None:
            return replace(self, steps=2 * plan.accum_steps)
        return replace(self, micro=-(-num_groups // 2) * plan.group_size, steps=None)

    def _groups_per_micro_batch(self, group_size: int) -> int | None:
        """Count `micro` in groups.

        Raises:
            ConfigError: it would divide a group.
        """
        if self.micro is None:
            return None
        if self.micro % group_size:
            nearest = max(1, round(self.micro / group_size)) * group_size
            raise ConfigError(
                f"accum.micro: {self.micro} divides groups of {group_size} samples that must stay "
                f"together. The nearest valid value is accum.micro={nearest}"
            )
        return self.micro // group_size

    def _starts(self, num_groups: int, micro: int | None) -> IntArray:
        if micro is not None:
            return np.arange(0, num_groups, micro, dtype=np.int64)
        return even_starts(num_groups, min(num_groups, self.steps or 1))


@final
@dataclass(frozen=True, kw_only=True)
class Budget(Cut):
    """The cheapest cuts under a cap that the user gives: `accum=budget`.

    Attributes:
        micro: most samples of a micro-batch.
        max_tokens: most padded tokens of a micro-batch.
        lowered: what an allocation failure has lowered the cap to. A single longer sample still
            gets its try, alone: only the allocator knows.
    """

    micro: int | None = None
    max_tokens: int
    lowered: int | None = None

    def __post_init__(self) -> None:
        """Refuse a missing cap and sizes below one."""
        _require_sizes(("max_tokens",), micro=self.micro, max_tokens=self.max_tokens)

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch at the least cost; see `Cut.cut`.

        Raises:
            ConfigError: if the cap is less than the longest sample.
        """
        layout = with_shapes(lengths, layout)
        _, length, padded = _longest(lengths, layout)
        _refuse_small_micro(self.micro, layout)
        if padded > self.max_tokens:
            rounded = "" if padded == length else f", padded to {padded}"
            if layout.group_size > 1:
                rounded = f" in a group of {layout.group_size}, which takes {padded}"
            raise ConfigError(
                f"accum.max_tokens: {self.max_tokens} is less than the longest sample, of {length} "
                f"tokens{rounded}. The nearest valid value is accum.max_tokens={padded}"
            )
        cap = min(self.max_tokens, self.lowered or self.max_tokens)
        return _cheapest(lengths, layout, cap, self.micro)

    def smaller(self, plan: Plan) -> Budget | None:
        """Lower the cap; see `Cut.smaller`."""
        lowered = _lowered(plan)
        return None if lowered is None else replace(self, lowered=lowered)


@final
@dataclass(frozen=True, kw_only=True)
class Auto(Cut):
    """The cheapest cuts under a cap that is found by tuning: `accum=auto`.

    Attributes:
        micro: most samples of a micro-batch.
        memory: bytes that may be used; `None` is what the device or the process has.
        max_tokens: most padded tokens of a micro-batch of several samples; `None` until tuned.
        alone: padded tokens up to which a sample that is longer may form a micro-batch of its
            own, since memory holds it; `None` allows no more than `max_tokens`.
        cost: the time model; the layout's until tuned.
        lowered: as in `Budget`.
    """

    micro: int | None = None
    memory: int | None = None
    max_tokens: int | None = None
    alone: int | None = None
    cost: Cost | None = None
    lowered: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        _require_sizes(
            micro=self.micro, memory=self.memory, max_tokens=self.max_tokens, alone=self.alone
        )

    @property
    def hard_cap(self) -> int | None:
        """Most padded tokens of any micro-batch; `None` until tuned."""
        return None if self.max_tokens is None else max(self.max_tokens, self.alone or 0)

    def tuned(self, cap: int, cost: Cost, alone: int | None = None) -> Auto:
        """Return this cut with the caps and the time model that tuning found."""
        return replace(self, max_tokens=cap, cost=cost, alone=alone, lowered=None)

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch at the least cost; see `Cut.cut`.

        Raises:
            SampleTooLongError: if one sample alone exceeds the cap.
            ValueError: if the cut has not been tuned.
        """
        if self.max_tokens is None:
            raise ValueError("accum=auto cuts nothing before it is tuned: call tuned() first")
        layout = with_shapes(lengths, replace(layout, cost=self.cost or layout.cost))
        position, length, padded = _longest(lengths, layout)
        _refuse_small_micro(self.micro, layout)
        hard_cap = max(self.max_tokens, self.alone or 0)
        if padded > hard_cap:
            raise SampleTooLongError(position, length, hard_cap)
        cap = min(self.max_tokens, self.lowered or self.max_tokens)
        return _cheapest(lengths, layout, cap, self.micro)

    def smaller(self, plan: Plan) -> Auto | None:
        """Lower the cap; see `Cut.smaller`."""
        lowered = _lowered(plan)
        return None if lowered is None else replace(self, lowered=lowered)


def _cheapest(lengths: IntArray, layout: Layout, cap: int, max_micro: int | None) -> Plan:
    return (pack if layout.packed else partition)(lengths, layout, cap, max_micro)


def _refuse_small_micro(micro: int | None, layout: Layout) -> None:
    """Refuse a bound on the samples of a micro-batch that no group could keep to.

    Raises:
        ConfigError: naming the smallest that works.
    """
    if micro is not None and micro < layout.group_size:
        raise ConfigError(
            f"accum.micro: {micro} is less than a group of {layout.group_size} samples that must "
            f"stay together. The nearest valid value is accum.micro={layout.group_size}"
        )


def _lowered(plan: Plan) -> int | None:
    """Choose the next cap after a failure under `plan`; None where nothing can be cut further.

    It is measured on the largest micro-batch that can be cut, not on the largest: a single sample
    may be larger, and which of the two failed is not known here. So it falls with every failure,
    and after at most `log(cap) / log(10 / 7)` of them each micro-batch is one sample.
    """
    shared = plan.max_shared_positions
    return max(1, shared * SHRINK[0] // SHRINK[1]) if shared else None


def _longest(lengths: IntArray, layout: Layout) -> tuple[int, int, int]:
    """Find the longest sample: its position, its tokens, and what a micro-batch pays for it.

    Where samples form groups it is the longest of the dearest group, and what that group takes.
    """
    size = layout.group_size
    # Packed rows are rounded up within the cap, and padding keeps the order of lengths.
    padded = lengths if layout.packed else pad(lengths, layout)
    if size == 1:
        position = int(lengths.argmax())
        return position, int(lengths[position]), int(padded[position])
    starts = np.arange(0, len(lengths), size)
    sizes = np.minimum(size, len(lengths) - starts)
    combined = totals_of_groups(padded, size) if layout.packed else longest_of_groups(padded, size)
    needed = combined if layout.packed else combined * sizes
    dearest = int(needed.argmax())
    begin = int(starts[dearest])
    position = begin + int(lengths[begin : begin + size].argmax())
    return position, int(lengths[position]), int(needed[dearest])


def _require_sizes(needed: tuple[str, ...] = (), **sizes: object) -> None:
    """Refuse what is not a whole number of at least one; null passes where it is not needed.

    Raises:
        ConfigError: naming every such key.
    """
    faults = []
    for key, size in sizes.items():
        if size is None and key in needed:
            faults.append(f"accum.{key}: needed by this cut, e.g. accum.{key}=8192")
        elif size is not None and not _is_size(size):
            faults.append(f"accum.{key}: must be a whole number of at least 1, got {size!r}")
    if faults:
        raise ConfigError(*faults)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
