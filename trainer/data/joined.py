"""Put the parts of a data set that splits itself end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from trainer.data.view import DataView

# What `Samples` lists as optional, and is the same for both parts.
_SHARED = ("collate", "draws_randomness", "vocab_size", "num_classes", "pad_token_id")


@final
class Joined:
    """The parts of a data set that splits itself, one after the other."""

    def __init__(self, parts: Sequence[DataView]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])
        for name in _SHARED:
            setattr(self, name, parts[0].optional(name))
        if all(part.states_lengths for part in parts):
            self.lengths = np.concatenate([part.lengths[:] for part in parts])
        self.fingerprint = "|".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        """Give a sample as its part does."""
        number = int(np.searchsorted(self._ends, i, side="right"))
        part, start = self._parts[number], int(self._ends[number - 1]) if number else 0
        return part.dataset[int(part.ids(np.array([i - start]))[0])]
