"""What a cut is: the pure function from the lengths of one global batch to micro-batches.

A cut says which samples share a micro-batch, and nothing else. It sees numbers only, gives the
same answer on every rank, and may reorder freely: the gradient of a global batch does not depend
on how the batch is cut, because losses are sums and one place divides.

To add one, subclass `Cut` and name the class in a YAML file of the group `accum`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of one micro-batch of `n` samples padded to `length`, in units of one token's time.

    `fixed + n * length + quadratic * n * length**2`. Fitted by the tuner from timed shapes.

    Attributes:
        fixed: cost of a micro-batch that does not depend on its size, in tokens.
        quadratic: attention's share, per token of length.
        seconds_per_token: scale to seconds; `None` when nothing was timed.
    """

    fixed: float = 33.0
    quadratic: float = 0.001
    seconds_per_token: float | None = None

    def tokens(self, num_samples: int, length: int) -> float:
        """Cost of one micro-batch in token equivalents."""
        return self.fixed + num_samples * length * (1.0 + self.quadratic * length)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the hardware and the model ask of every cut.

    Attributes:
        world_size: data-parallel ranks.
        lockstep: every micro-batch contains a collective, so all ranks need the same count.
        pad_multiple: lengths are padded up to a multiple of this.
        max_shapes: largest number of distinct padded lengths, for compiled models.
        packed: documents of a micro-batch are laid end to end, without padding.
        cost: the time model.
    """

    world_size: int = 1
    lockstep: bool = False
    pad_multiple: int = 1
    max_shapes: int | None = None
    packed: bool = False
    cost: Cost = field(default_factory=Cost)


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """One global batch cut into micro-batches, for every rank.

    Attributes:
        ranks: `[rank][slot]`: positions in the global batch, each array `(num_samples,)`; an
            empty array is a slot of zero weight that only fills a count.
        lengths: `(global batch,)`, tokens of each sample.
        padded_lengths: `[rank][slot]`: the length every sample of that micro-batch is padded to
            (under packing: the number of positions of the row).
        packed: as in `Layout`.
    """

    ranks: tuple[tuple[IntArray, ...], ...]
    lengths: IntArray
    padded_lengths: tuple[tuple[int, ...], ...]
    packed: bool = False

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step, over all ranks."""
        return sum(len(slots) for slots in self.ranks)

    @cached_property
    def accum_steps(self) -> int:
        """Micro-batches of the busiest rank."""
        return max(len(slots) for slots in self.ranks)

    def positions(self, rank: int, slot: int) -> int:
        """Computed positions of one micro-batch: samples times padded length."""
        length = self.padded_lengths[rank][slot]
        return length if self.packed else len(self.ranks[rank][slot]) * length

    @cached_property
    def num_positions(self) -> int:
        """Computed positions of the step, over all ranks."""
        return sum(
            self.positions(rank, slot)
            for rank, slots in enumerate(self.ranks)
            for slot in range(len(slots))
        )

    @cached_property
    def max_positions(self) -> int:
        """Computed positions of the largest micro-batch."""
        return max(
            (self.positions(r, s) for r, slots in enumerate(self.ranks) for s in range(len(slots))),
            default=0,
        )

    @cached_property
    def padding(self) -> float:
        """Share of computed positions that hold no token."""
        computed = self.num_positions
        return 1.0 - float(self.lengths.sum()) / computed if computed else 0.0


class Cut(ABC):
    """Which samples of a global batch share a micro-batch.

    Subclasses are frozen dataclasses whose fields are the keys of their YAML file.
    """

    keeps_order: bool = False
    """Whether micro-batches hold samples in sample order, unsorted (a mean of means needs it)."""

    @abstractmethod
    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch.

        Args:
            lengths: `(global batch,)`, tokens of each sample, in sample order.
            layout: what hardware and model ask.

        Returns:
            A plan that holds every position exactly once.
        """

    @abstractmethod
    def smaller(self, plan: Plan) -> Cut | None:
        """Answer an allocation failure under `plan` with a cut of smaller micro-batches.

        Returns:
            The cut to replay the same global batch with, or `None` when `plan` already holds
            one sample per micro-batch.
        """
