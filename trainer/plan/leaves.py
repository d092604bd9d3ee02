"""Micro-batches that stay the same for every number of ranks: `deterministic=layout`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NoReturn, final

import numpy as np

from trainer.errors import DoesNotFitError
from trainer.plan.cut import Cut, IntArray, Layout, Plan
from trainer.plan.partition import even_starts, pad, split


@final
@dataclass(frozen=True, kw_only=True)
class Leaves(Cut):
    """The global batch in sample order, cut into micro-batches, which are then dealt to ranks.

    Where a cut for ranks first would give each rank its share and cut that, here the micro-batches
    do not depend on the ranks, and neither does any draw in them.

    Attributes:
        micro: samples per micro-batch; the last may be short.
    """

    keeps_order: ClassVar[bool] = True

    micro: int

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        """Cut one global batch; see `Cut.cut`."""
        everyone = np.arange(len(lengths), dtype=np.int64)
        leaves = split(everyone, np.arange(0, len(lengths), self.micro, dtype=np.int64))
        first = [*map(int, even_starts(len(leaves), layout.world_size)), len(leaves)]
        ranks = tuple(tuple(leaves[begin:end]) for begin, end in pairwise(first))
        padded = lengths if layout.packed else pad(lengths, layout)
        return Plan(
            ranks=ranks,
            lengths=lengths,
            padded_lengths=tuple(
                tuple(_length(padded[leaf], layout) for leaf in slots) for slots in ranks
            ),
            packed=layout.packed,
        )

    def smaller(self, plan: Plan) -> NoReturn:
        """Refuse: other micro-batches would give other bits.

        Raises:
            DoesNotFitError: always.
        """
        raise DoesNotFitError(
            f"a micro-batch of {self.micro} samples does not fit into memory, and "
            "deterministic=layout fixes the micro-batches: lower accum.micro"
        )


def _length(held: IntArray, layout: Layout) -> int:
    """Pad to the longest sample; a packed row to the multiple."""
    if not layout.packed:
        return int(held.max())
    return -(-int(held.sum()) // layout.pad_multiple) * layout.pad_multiple
