"""Put parts of a data set, or several data sets, one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from trainer.core.rows import Row, RunFacts
from trainer.data.samples import Sample
from trainer.data.view import DataView
from trainer.plan.cut import IntArray

_SAME = ("collate", "decode", "label_names", "pad_token_id", "prompt")
"""What `Samples` lists as optional, and parts have alike: that of the first is taken."""


class Joined(Dataset[Sample]):
    """Samples of several parts, one part after the other.

    Of a part with more samples than are taken those at even distances are; one with fewer begins
    anew.

    Args:
        views: the parts by name.
        counts: how many samples of each; None is all, once.

    Attributes:
        original_ids: `(samples,)`, what a person reads; None where that is the place here.
    """

    def __init__(
        self, views: Mapping[str, DataView], counts: Mapping[str, int] | None = None
    ) -> None:
        self.original_ids: IntArray | None = None
        self._names, self._views = [*views], [*views.values()]
        self._counts = [len(v) if counts is None else counts[n] for n, v in views.items()]
        self._ends = np.cumsum([0, *self._counts])
        self.draws_randomness = any(view.draws_randomness for view in self._views)
        self.num_cut = sum(view.facts.num_cut for view in self._views)
        for name in _SAME:
            setattr(self, name, self._views[0].optional(name) if views else None)
        for name in ("vocab_size", "num_classes"):
            known = [getattr(view.facts, name) for view in self._views]
            setattr(self, name, None if None in known else max(known, default=None))
        limits = [view.optional("max_length") for view in self._views]
        self.max_length = None if None in limits else max(limits, default=None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Sample:
        """Give a sample as its part does."""
        part, place = self._place(i)
        view = self._views[part]
        sample: Sample = view.dataset[int(view.ids(np.array([place]))[0])]
        return sample

    def name_of(self, i: int) -> str:
        """Name a sample for a message, as its part does."""
        part, place = self._place(i)
        return self._views[part].name_of(place)

    def ids_in_parts(self) -> IntArray:
        """Give the id that each sample has in its part, where every one is there once."""
        ids = [view.original_ids(np.arange(len(view))) for view in self._views]
        return np.concatenate([np.zeros(0, dtype=np.int64), *ids])

    def _place(self, i: int) -> tuple[int, int]:
        """Give the number of a sample's part, and the place there."""
        part = int(np.searchsorted(self._ends, i, side="right")) - 1
        return part, int(self._places(part, np.array([i - self._ends[part]]))[0])

    def _places(self, part: int, steps: IntArray) -> IntArray:
        """Give the places in a part of some of its samples here."""
        size, count = len(self._views[part]), self._counts[part]
        places: IntArray = steps * size // count if count < size else steps % size
        return places

    @cached_property
    def lengths(self) -> npt.NDArray[Any]:
        """Tokens of each sample, `(samples,)`."""
        found = [self._lengths(part) for part in range(len(self._views))]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def _lengths(self, part: int) -> IntArray:
        places = self._places(part, np.arange(self._counts[part]))
        lengths: IntArray = self._views[part].lengths[places]
        return lengths

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the parts and how many samples of each there are."""
        prints = (view.fingerprint for view in self._views)
        text = "|".join(map(str, zip(self._names, self._counts, prints, strict=True)))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say what the records are, as the first part does."""
        describe = self._views[0].optional("describe_records")
        rows: Sequence[Row] = () if describe is None else describe(facts)
        return rows
