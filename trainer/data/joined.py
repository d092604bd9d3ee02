"""Put data sets one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch.utils.data import Dataset

from trainer.data.samples import DataFacts, Sample
from trainer.data.view import DataView
from trainer.plan.cut import IntArray

Counts = Mapping[str, int]  # of samples, by part
NO_IDS = np.zeros(0, dtype=np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One of the data sets that are mixed, opened."""

    train: DataView
    held_out: DataView | None
    weight: float  # samples of it in an epoch are proportional to this
    num_left_out: int = 0  # samples that are in no epoch, as another source holds them out


class Joined(Dataset[Sample]):
    """Samples of several parts, one part after the other.

    Of a part with more samples than are taken those at even distances are; one with fewer begins
    anew. Without `counts` every sample is taken once. A person reads the place here as the id of a
    sample or, with `keeps_ids`, the id that it has in its part.
    """

    def __init__(
        self,
        views: Mapping[str, DataView],
        counts: Counts | None = None,
        *,
        keeps_ids: bool = False,
    ) -> None:
        self._keeps_ids = keeps_ids
        self._names, self._views = [*views], [*views.values()]
        if counts is None:
            self._counts = [*map(len, self._views)]
        else:
            self._counts = [counts[name] for name in views]
        self._ends = np.cumsum([0, *self._counts])

    def facts(self) -> DataFacts:
        """Say what is known of all parts; what they have alike is that of the first."""
        known = [view.facts for view in self._views]
        first, ids = next(iter(known), DataFacts()), None
        if self._keeps_ids:
            own = [view.original_ids(np.arange(len(view))) for view in self._views]
            ids = np.concatenate([NO_IDS, *own])
        return DataFacts(
            lengths=self._lengths(),
            draws_randomness=any(each.draws_randomness for each in known),
            collate=first.collate,
            fingerprint=self._fingerprint,
            vocab_size=_largest([each.vocab_size for each in known]),
            num_classes=_largest([each.num_classes for each in known]),
            label_kind=first.label_kind,
            pad_token_id=first.pad_token_id,
            max_length=_largest([each.max_length for each in known]),
            label_names=first.label_names,
            decode=first.decode,
            decode_answer=first.decode_answer,
            answer_ends=first.answer_ends,
            prompt=first.prompt,
            name_of=self.name_of,
            describe_records=first.describe_records,
            num_cut=sum(each.num_cut for each in known),
            original_ids=ids,
        )

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

    def _place(self, i: int) -> tuple[int, int]:
        """Give the number of a sample's part, and the place there."""
        part = int(np.searchsorted(self._ends, i, side="right")) - 1
        return part, int(self._places(part, np.array([i - self._ends[part]]))[0])

    def _places(self, part: int, steps: IntArray) -> IntArray:
        """Give the places in a part of some of its samples here."""
        size, count = len(self._views[part]), self._counts[part]
        places: IntArray = steps * size // count if count < size else steps % size
        return places

    def _lengths(self) -> IntArray:
        """Give the tokens of each sample, `(samples,)`."""
        return np.concatenate([NO_IDS, *map(self._lengths_of, range(len(self._views)))])

    def _lengths_of(self, part: int) -> IntArray:
        places = self._places(part, np.arange(self._counts[part]))
        lengths: IntArray = self._views[part].lengths[places]
        return lengths

    def _fingerprint(self) -> str:
        """SHA-256 over the parts and how many samples of each there are."""
        prints = (view.fingerprint for view in self._views)
        text = "|".join(map(str, zip(self._names, self._counts, prints, strict=True)))
        return hashlib.sha256(text.encode()).hexdigest()


def _largest(found: Sequence[int | None]) -> int | None:
    """Give the largest of some numbers, if all are known."""
    if None in found:
        return None
    return max(found, default=None)  # type: ignore[type-var] # None is out
