"""Micro-batches that stay the same for every number of ranks: `deterministic=layout`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NoReturn, final

import numpy as np

from trainer.core.errors import DoesNotFitError
from trainer.plan.cut import Cut, IntArray, Layout, Plan
from trainer.plan.partition import even_starts, padded_apart, split


@final
@dataclass(frozen=True, kw_only=True)
class LayoutInvariant(Cut):
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
        pieces = split(everyone, np.arange(0, len(lengths), self.micro, dtype=np.int64))
        first = [*map(int, even_starts(len(pieces), layout.world_size)), len(pieces)]
        ranks = tuple(tuple(pieces[begin:end]) for begin, end in pairwise(first))
        return padded_apart(ranks, lengths, layout)

    def smaller(self, plan: Plan) -> NoReturn:
        """Refuse: other micro-batches would give other bits.

        Raises:
            DoesNotFitError: always.
        """
        raise DoesNotFitError(
            f"a micro-batch of {self.micro} samples does not fit into memory, and "
            "deterministic=layout fixes the micro-batches: lower accum.micro"
        )
