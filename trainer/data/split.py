"""Say how training and held-out samples were parted.

Nothing here chooses samples: `view.split_by_seed` does, or the data set itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from trainer.data.view import DataView

LISTED_IDS = 100_000
"""Most held-out ids that are listed."""

FAR = 0.05
"""How far the share held out may be from the one asked for, beyond a factor of two."""


@final
@dataclass(frozen=True, kw_only=True)
class Split:
    """How training and held-out samples were parted."""

    rule: str  # in words
    holdout: float | None  # share that was asked for; None where the data bring their own parts
    seed: int  # `data.split_seed`.
    warnings: tuple[str, ...] = ()  # what a person must know about it

    def to_json(self, train: DataView, held_out: DataView | None) -> dict[str, Any]:
        """Give splits.json: the rule, the counts, and the held-out ids up to `LISTED_IDS`."""
        count = 0 if held_out is None else len(held_out)
        places = np.arange(min(count, LISTED_IDS))
        ids: list[int] = [] if held_out is None else held_out.original_ids(places).tolist()
        return {
            "rule": self.rule,
            "holdout": self.holdout,
            "split_seed": self.seed,
            "num_training": len(train),
            "num_held_out": count,
            "num_listed": len(ids),
            "held_out": ids,
        }


def split_warnings(split: Split, train: DataView, held_out: DataView) -> Iterable[str]:
    """Warn of a share far from the one asked for."""
    if asked := split.holdout:
        parts = {
            "tokens": (held_out.lengths.sum(), train.lengths.sum()),
            "samples": (len(held_out), len(train)),
        }
        for unit, (out, rest) in parts.items():
            share = out / (out + rest)
            if abs(share - asked) > FAR and not asked / 2 <= share <= 2 * asked:
                yield (
                    f"data.holdout={asked:g}: {share:.0%} of the {unit} are held out "
                    f"({split.rule}); divide the data into more and smaller pieces, or set another "
                    "share"
                )
                return
