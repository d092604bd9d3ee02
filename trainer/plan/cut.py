"""What a cut is: the pure function from the lengths of one global batch to micro-batches.

A cut says which samples share a micro-batch, and nothing else. It sees numbers only, gives the
same answer on every rank, and may reorder freely: the gradient of a global batch does not depend
on how the batch is cut, because losses are sums and one place divides.

To add one, subclass `Cut` and name the class in a YAML file of the group `accum`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from trainer.core import coupling
from trainer.core.errors import ConfigError
from trainer.core.format import number, plural
from trainer.core.rows import Described, Row, RunFacts, row

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of one micro-batch of `n` samples padded to `length`, in units of one token's time.

    `fixed + n * length + quadratic * n * length**2`. Fitted by the tuner from timed shapes.
    """

    fixed: float = 33.0  # cost of a micro-batch that does not depend on its size, in tokens
    quadratic: float = 0.001  # attention's share, per token of length
    seconds_per_token: float | None = None  # scale to seconds; `None` when nothing was timed

    def per_sample(self, lengths: IntArray) -> FloatArray:
        """Cost of each sample alone, without the micro-batch's fixed share, `(num_samples,)`."""
        sizes = lengths.astype(np.float64)
        return sizes * (1.0 + self.quadratic * sizes)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What hardware and model ask of every cut."""

    world_size: int = 1  # data-parallel ranks
    # Every micro-batch contains a collective, so all ranks need the same count
    lockstep: bool = False
    pad_multiple: int = 1  # lengths are padded up to a multiple of this
    # The multiple pads no sample beyond it, since a model may take no more
    longest: int | None = None
    # The padded lengths, ascending, where a compiled model bounds them. The number of samples is
    # not bounded: it is the one dimension to compile as dynamic.
    shapes: tuple[int, ...] = ()
    max_shapes: int | None = None  # most distinct lengths of packed rows, likewise
    packed: bool = False  # documents of a micro-batch are laid end to end, without padding
    # That many consecutive samples of the global batch form a group that no cut divides (they are
    # normalised together, say); the last may be short
    group_size: int = 1
    cost: Cost = field(default_factory=Cost)  # the time model

    @property
    def group_note(self) -> str:
        """Name the group of a sample that does not fit, for a message."""
        if self.group_size == 1:
            return ""
        return f", in a group of {self.group_size} which no cut divides,"


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """One global batch cut into micro-batches, for every rank."""

    # `[rank][slot]`: positions in the global batch, each array `(num_samples,)`; an empty array is
    # a slot of zero weight that only fills a count
    ranks: tuple[tuple[IntArray, ...], ...]
    lengths: IntArray  # `(global batch,)`, tokens of each sample
    # `[rank][slot]`: the length every sample of that micro-batch is padded to (under packing: the
    # number of positions of the row); 0 for an empty slot
    padded_lengths: tuple[tuple[int, ...], ...]
    packed: bool = False  # as in `Layout`
    # As in `Layout`; the groups of a micro-batch lie one after the other, a short one last
    group_size: int = 1
    # So many micro-batches of each rank, its first ones, are of samples as if drawn at random
    random_slots: int = 0

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return len(self.lengths)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step, over all ranks."""
        return sum(map(len, self.ranks))

    @cached_property
    def accum_steps(self) -> int:
        """Micro-batches of the busiest rank."""
        return max(map(len, self.ranks))

    def positions(self, rank: int, slot: int) -> int:
        """Computed positions of one micro-batch: samples times padded length."""
        length = self.padded_lengths[rank][slot]
        return length if self.packed else len(self.ranks[rank][slot]) * length

    def num_tokens(self, rank: int, slot: int) -> int:
        """Tokens of one micro-batch, padding left out."""
        return int(self.lengths[self.ranks[rank][slot]].sum())

    def slots(self) -> Iterator[tuple[int, int]]:
        """Walk over the micro-batches: `(rank, slot)`, rank by rank."""
        for rank, own in enumerate(self.ranks):
            for slot in range(len(own)):
                yield rank, slot

    @cached_property
    def num_positions(self) -> int:
        """Computed positions of the step, over all ranks."""
        return sum(self.positions(rank, slot) for rank, slot in self.slots())

    @cached_property
    def max_positions(self) -> int:
        """Computed positions of the largest micro-batch."""
        return max(self.positions(rank, slot) for rank, slot in self.slots())

    @cached_property
    def max_shared_positions(self) -> int:
        """Computed positions of the largest micro-batch that can be cut: of two groups or more."""
        largest = 0
        for rank, slot in self.slots():
            if len(self.ranks[rank][slot]) > self.group_size:
                largest = max(largest, self.positions(rank, slot))
        return largest

    @cached_property
    def padding(self) -> float:
        """Share of computed positions that hold no token."""
        computed = self.num_positions
        return 0.0 if not computed else 1.0 - float(self.lengths.sum()) / computed

    @property
    def product(self) -> str:
        """Write what the global batch is cut into: `1 rank x 8 micro-batches x 64 samples`."""
        counts = [len(self.ranks[rank][slot]) for rank, slot in self.slots()]
        low, high, ranks = min(counts), max(counts), plural(len(self.ranks), "rank")
        right = f"{ranks} x {plural(self.accum_steps, 'micro-batch')}"
        if len(self.ranks) * self.accum_steps != len(counts):
            most = f"at most {self.accum_steps} each"
            right = f"{plural(len(counts), 'micro-batch')} over {ranks}, {most}"
        if low < high:
            return f"{right} of {number(low)} to {number(high)} samples"
        return f"{right} x {plural(low, 'sample')}"

    @property
    def shapes(self) -> list[dict[str, Any]]:
        """The micro-batches, as plan.json lists them; under packing a length is that of the row."""
        return [
            {
                "rank": rank,
                "num_samples": len(self.ranks[rank][slot]),
                "length": self.padded_lengths[rank][slot],
                "packed": self.packed,
                "num_tokens": self.num_tokens(rank, slot),
            }
            for rank, slot in self.slots()
        ]

    def check(self, layout: Layout) -> None:
        """Refuse a plan that would train on another global batch, or hang, under its layout."""
        if fault := self._fault(layout):
            raise ConfigError(f"accum: the micro-batch plan is invalid: it {fault}")

    def _fault(self, layout: Layout) -> str | None:
        if len(self.ranks) != layout.world_size:
            return f"is for a world size of {len(self.ranks)}, not {layout.world_size}"
        flat = [*chain.from_iterable(self.ranks)]
        cut = np.sort(np.concatenate(flat or [self.lengths[:0]]))
        if not np.array_equal(cut, np.arange(self.num_samples)):
            return "does not hold every sample of the global batch exactly once"
        if layout.lockstep and len(set(map(len, self.ranks))) > 1:
            return (
                "has different numbers of micro-batches on ranks that run in lockstep: give each "
                "as many, or type sync=deferred"
            )
        tokens = per_slot(np.add if self.packed else np.maximum, self.lengths, self.ranks)
        too_long = tokens > np.array([*chain.from_iterable(self.padded_lengths)])
        if too_long.any():
            rank, slot = list(self.slots())[too_long.argmax()]
            return f"cuts tokens off in micro-batch {slot} of rank {rank}"
        size = layout.group_size
        for ids in flat if size > 1 else ():
            # What it should hold: the whole group of each group's first sample.
            groups = (ids[::size, None] // size * size + np.arange(size)).ravel()
            if not np.array_equal(ids, groups[: len(ids)]):
                return f"divides a group of {size} samples that must stay together"
        return None


def per_slot(combine: np.ufunc, values: IntArray, ranks: Sequence[Sequence[IntArray]]) -> IntArray:
    """Combine a value of every sample to one of every micro-batch, rank by rank; 0 if it is empty.

    For all at once: on 1,024 ranks there are thousands of them.
    """
    slots = [*chain.from_iterable(ranks)]
    sizes = np.array([*map(len, slots)], dtype=np.int64)
    is_full = sizes > 0
    found = np.zeros(len(slots), dtype=np.int64)
    if is_full.any():
        begins = (np.cumsum(sizes) - sizes)[is_full]
        found[is_full] = combine.reduceat(values[np.concatenate(slots)], begins)
    return found


@dataclass(frozen=True, kw_only=True)
class Cut(Described, ABC):
    """Which samples of a global batch share a micro-batch.

    Subclasses are frozen dataclasses whose fields are the keys of their YAML file.
    """

    couplings: ClassVar[frozenset[coupling.CouplingKind]] = frozenset({"none", "group", "batch"})
    """The couplings of samples it may cut. With `micro_batch` it must give those sizes that were
    typed, in sample order, unsorted: the cut is then a part of the step."""

    chooses_sizes: ClassVar[bool] = False
    """Whether it chooses the sizes of micro-batches: what needs those that were typed refuses it,
    before PyTorch is imported."""

    is_tunable: ClassVar[bool] = False
    """Whether a trial on this machine may choose more than its cap: `needs_tuning` then asks."""

    @property
    def hard_cap(self) -> int | None:
        """Most padded tokens of any micro-batch; None where nothing bounds them, or not yet."""
        return None

    @property
    def in_order(self) -> Cut | None:
        """The cut under the same bound of samples that keeps their order; None without one."""
        return None

    @property
    def for_any_ranks(self) -> Cut | None:
        """The cut of micro-batches that are the same on any number of ranks; None without one."""
        return None

    @property
    def needs_tuning(self) -> bool:
        """Whether it cuts only once `tuned` gave it what was found to fit and to be fast."""
        return False

    def tuned(self, cap: int, cost: Cost, single_sample_cap: int) -> Cut:
        """Return this cut with what tuning found.

        Args:
            cap: most padded tokens of a micro-batch of several samples.
            cost: the time model.
            single_sample_cap: padded tokens up to which a longer sample may be alone.
        """
        raise NotImplementedError(f"{type(self).__name__} is not tuned")

    @abstractmethod
    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch.

        Args:
            lengths: `(global batch,)`, tokens of each sample, in sample order.
            layout: what hardware and model ask.

        Returns:
            A plan that holds every position exactly once.
        """

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """See the base class."""
        return [row(max_tokens=self.hard_cap)]

    @abstractmethod
    def smaller(self, plan: Plan) -> Cut | None:
        """Answer an allocation failure under `plan` with a cut of smaller micro-batches.

        Returns:
            The cut to replay the global batch with, a pure function of `plan` and so the same on
            every rank; `None` when `plan` already holds one sample per micro-batch.
        """
