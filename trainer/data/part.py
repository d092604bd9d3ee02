"""Name the samples of one side of a split by their place there: listed, or by a formula.

By the formula one sample of each stretch of neighbours is held out. Both sides keep the order of
the data, and neither is a list: the sample at any place takes some ten operations to name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from trainer.core.world import rng_key
from trainer.plan.cut import IntArray
from trainer.plan.permutation import below, mixed


@final
@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Samples that are listed, 8 bytes each."""

    positions: IntArray  # (samples,)

    def __len__(self) -> int:
        return len(self.positions)

    def __call__(self, places: IntArray) -> IntArray:
        """Give the samples at some places."""
        found: IntArray = self.positions[places]
        return found


@final
@dataclass(frozen=True, slots=True)
class HeldOutPart:
    """One sample of each of `held_out` stretches of `whole` samples, which differ by one in size.

    Attributes:
        whole: samples of both sides.
        held_out: samples of this one, at least 1; `whole * held_out` is below 2^63.
        seed: selects them.
    """

    whole: int
    held_out: int
    seed: int

    def __len__(self) -> int:
        return self.held_out

    def __call__(self, places: IntArray) -> IntArray:
        """Give the samples at some places."""
        begins, ends = (p * self.whole // self.held_out for p in (places, places + 1))
        draws = mixed(places.astype(np.uint64) ^ np.uint64(rng_key("holdout", self.seed)))
        found: IntArray = begins + below(draws, (ends - begins).astype(np.uint64)).astype(np.int64)
        return found


@final
@dataclass(frozen=True, slots=True)
class TrainPart:
    """The samples that `HeldOutPart` leaves."""

    whole: int
    held_out: int
    seed: int

    def __len__(self) -> int:
        return self.whole - self.held_out

    def __call__(self, places: IntArray) -> IntArray:
        """Give the samples at some places."""
        # Before stretch `s` lie `floor(s whole / held_out)` samples, all but `s` of them ours.
        stretches = ((places + 1) * self.held_out - 1) // len(self)
        found: IntArray = places + stretches
        held_out = HeldOutPart(self.whole, self.held_out, self.seed)(stretches)
        return found + (found >= held_out)


Part = Listed | HeldOutPart | TrainPart
