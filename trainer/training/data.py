"""Define the first stage of a run: what is trained and evaluated on, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import final

import numpy as np

from trainer.data.loader import Loader, Request
from trainer.data.split import OWN_PART
from trainer.data.view import DataView
from trainer.plan.cut import IntArray, Layout
from trainer.plan.cuts import Budget
from trainer.plan.lengths import Lengths
from trainer.plan.order import Order, Stage
from trainer.plan.partition import pad_length

PLANNED_AT_ONCE = 8192  # samples planned at once


@final
@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out samples, cut by a cap of their own."""

    loader: Loader
    lengths: Lengths  # tokens of every held-out sample
    layout: Layout
    max_tokens: int  # cap on the computed positions of a micro-batch
    # Of them that are evaluated, evenly spaced and the same each time; None is all
    most: int | None = None
    # Parts of which this one is made, and whose sums give its figures; none where it is evaluated
    joins: tuple[str, ...] = ()
    is_ordered: bool = False  # micro-batches and sums have the same bits for every number of ranks

    @property
    def num_samples(self) -> int:
        """Samples that are evaluated."""
        if self.most is None:
            return len(self.lengths)
        return min(self.most, len(self.lengths))

    def chosen(self, start: int, stop: int) -> IntArray:
        """Give the positions of some of the samples that are evaluated, by their order."""
        places = np.arange(start, min(stop, self.num_samples))
        chosen: IntArray = places * len(self.lengths) // self.num_samples
        return chosen

    def requests(self, rank: int) -> Iterator[Request]:
        """Give this rank's micro-batches; over all ranks every sample comes exactly once."""
        longest = pad_length(self.lengths.max(initial=1), self.layout)
        cut = Budget(max_tokens=max(self.max_tokens, longest * self.layout.group_size))
        layout, row, first, size = self.layout, rank, 0, 1
        # What is cut for one rank is dealt to all.
        if self.is_ordered:
            layout = replace(self.layout, world_size=1)
            row, first, size = 0, rank, self.layout.world_size
        for start in range(0, self.num_samples, PLANNED_AT_ONCE):
            chosen = self.chosen(start, start + PLANNED_AT_ONCE)
            plan = cut.cut(self.lengths[chosen], layout)
            slots = zip(plan.ranks[row], plan.padded_lengths[row], strict=True)
            for slot, length in islice(slots, first, None, size):
                yield Request(
                    ids=tuple(chosen[slot].tolist()), epoch=0, pad_to=length, packed=plan.packed
                )


@final
@dataclass(frozen=True, kw_only=True)
class Data:
    """The samples of a run."""

    order: Order  # which samples each step takes
    lengths: Lengths  # tokens of every training sample
    loader: Loader  # of those: collated, and prepared for the objective
    total_steps: int  # of the whole run, those before a resumption included
    # What is evaluated on, by name; the run's own part has none
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)

    @property
    def train(self) -> DataView:
        """The samples that are trained on."""
        return self.loader.dataset

    @property
    def own_part(self) -> HeldOut | None:
        """The run's own held-out part; None where the data leave nothing to evaluate on."""
        return self.held_out.get(OWN_PART)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Runs of steps of one size; none where all have the same."""
        return self.order.stages(self.total_steps)
