"""Put data sets one after the other, and mix them: of each as many samples as its weight says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from math import ceil, floor
from typing import Any, Literal, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from trainer.config.components import Sources
from trainer.core.errors import ConfigError
from trainer.core.format import number, percent, plural, short
from trainer.core.rows import Row, RunFacts, join_parts, row
from trainer.data.samples import HELD_OUT, SOURCE, TRAIN, KeyArray, Sample, num_tokens
from trainer.data.view import DataView
from trainer.plan.cut import IntArray
from trainer.plan.lengths import picked

_NONE = np.zeros(0, dtype=np.uint64)
_SAME = ("collate", "decode", "label_names", "pad_token_id", "prompt")
"""What `Samples` lists as optional, and parts have alike: that of the first is taken."""


class Joined(Dataset[Sample]):
    """Samples of several parts, one part after the other.

    Of a part with more samples than are taken those at even distances are; one with fewer begins
    anew. Without `counts` every sample is taken once. `original_ids` are what a person reads,
    `(samples,)`; None where that is the place here.
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
        return self._views[0].describe_records(facts)


@final
@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One of the data sets that are mixed, opened."""

    train: DataView
    held_out: DataView | None
    weight: float  # samples of it in an epoch are proportional to this
    num_left_out: int = 0  # samples that are in no epoch, as another source holds them out


@final
class Mixture:
    """Samples of several data sets in the shares of their weights.

    An epoch takes `N_s = N w_s / sum(w)` samples of source `s`, rounded by the largest remainder.
    Under `first_exhausted` the length of the epoch, `N`, is the most that repeats no sample; under
    `all_exhausted` the least that leaves none out. Of a source with more samples those at even
    distances are taken, the same in each epoch; one with fewer begins anew. The order in which the
    run shuffles an epoch, source and all, follows from (seed, epoch) alone. What is held out of
    each source is evaluated once, by itself and together, and trained on in no other one.

    Args:
        sources: by name, opened.
        stopping: `first_exhausted` or `all_exhausted`.

    Raises:
        ConfigError: an epoch would have no sample of a source.
    """

    def __init__(
        self,
        sources: Sources,
        stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
    ) -> None:
        opened = cast("Mapping[str, MixtureSource]", sources)  # as they come
        self._sources = _without_held_out(opened)
        sizes = {name: len(source.train) for name, source in self._sources.items()}
        weights = {name: Fraction(str(s.weight)) for name, s in self._sources.items()}
        self.counts = counts_by_weight(sizes, weights, stopping)
        for name, count in self.counts.items():
            if self._sources[name].train.optional("augment"):
                text = "a mixture changes no samples; leave it out"
                raise ConfigError(f"data.sources.{name}.augment: {text}")
            if count == 0:
                text = f"none of its samples is in an epoch of {sum(self.counts.values())}"
                remedy = "raise it, or type data.stopping=all_exhausted"
                weight = f"data.sources.{name}.weight={float(weights[name]):g}"
                raise ConfigError(f"{weight}: {text}; {remedy}")

    def splits(self) -> dict[str, MixturePart]:
        """Give what is trained on, with repeats, and what is held out, once."""
        train = {name: source.train for name, source in self._sources.items()}
        rest = {name: source.held_out for name, source in self._sources.items()}
        held_out = {name: view for name, view in rest.items() if view is not None}
        weights = {name: source.weight for name, source in self._sources.items()}
        part = MixturePart(held_out, None, weights)
        part.original_ids = part.ids_in_parts()
        left_out = {name: source.num_left_out for name, source in self._sources.items()}
        trained = MixturePart(train, self.counts, weights, left_out, is_marked=True)
        return {TRAIN: trained, HELD_OUT: part}


def _without_held_out(sources: Mapping[str, MixtureSource]) -> dict[str, MixtureSource]:
    """Take out of training what any source holds out, where data number their contents.

    Each source holds out a share of its own, so that two may part a text that is in both.
    """
    views = (source.held_out for source in sources.values())
    held_out = np.concatenate([_NONE, *(_contents(view) for view in views if view is not None)])
    found = dict(sources)
    for name, source in sources.items():
        keeps = ~np.isin(_contents(source.train), held_out)
        if not keeps.all():
            places, digest = np.flatnonzero(keeps), hashlib.sha256(keeps.data).hexdigest()
            train = DataView(source.train, len(places), partial(picked, places), digest)
            found[name] = replace(source, train=train, num_left_out=len(keeps) - len(places))
    return found


def _contents(view: DataView) -> KeyArray:
    """Number the contents of samples, `(samples,)`; none at all where the data do not."""
    contents = view.optional("contents")
    return _NONE if contents is None else np.asarray(contents)[view.ids(np.arange(len(view)))]


def counts_by_weight(
    sizes: Mapping[str, int], weights: Mapping[str, Fraction], stopping: str
) -> dict[str, int]:
    """Give the samples of each source in an epoch; see `Mixture`."""
    total = sum(weights.values(), Fraction(0))
    epochs = [sizes[name] * total / weights[name] for name in sizes]
    length = floor(min(epochs)) if stopping == "first_exhausted" else ceil(max(epochs))
    exact = {name: length * weights[name] / total for name in sizes}
    counts = {name: floor(share) for name, share in exact.items()}
    left = length - sum(counts.values())
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])  # stable
    return {name: counts[name] + (name in by_remainder[:left]) for name in sizes}


@final
class MixturePart(Joined):
    """Samples of several sources, one source after the other.

    Without `counts` every sample is taken once. `weights`, and the samples `left_out` as another
    source holds them out, are for messages. Marked samples say their source, for its training loss.
    `source_ids`, `(samples,)`, are places in `source_names`.
    """

    split_rule = "of each source as of data of its own"

    def __init__(
        self,
        views: Mapping[str, DataView],
        counts: Mapping[str, int] | None,
        weights: Mapping[str, float],
        left_out: Mapping[str, int] | None = None,
        *,
        is_marked: bool = False,
    ) -> None:
        super().__init__(views, counts)
        self._is_marked, self.source_names = is_marked, self._names
        self._weights, self._left_out = [weights[name] for name in views], left_out or {}
        self.source_ids = np.repeat(np.arange(len(views), dtype=np.int16), self._counts)

    def __getitem__(self, i: int) -> Sample:
        """Give a sample as its source does."""
        sample = super().__getitem__(i)
        return {**sample, **self._marks(i, sample)} if self._is_marked else sample

    def _marks(self, i: int, sample: Sample) -> Sample:
        """Say of every token, or of the sample, whether it is of each source."""
        shape = () if (count := num_tokens(sample)) is None else (count,)
        names, source = enumerate(self.source_names), self._place(i)[0]
        return {f"{SOURCE}{name}": torch.full(shape, number == source) for number, name in names}

    def source_of(self, i: int) -> str:
        """Name the source of a sample."""
        return self.source_names[self._place(i)[0]]

    def name_of(self, i: int) -> str:
        """Name a sample for a message, by its source."""
        return f"{super().name_of(i)} (data.sources.{self.source_of(i)})"

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say how much of each source an epoch takes, and how often it repeats."""
        rows, record, total = list[Row](), dict[str, Any](), int(self.lengths.sum())
        for source, name in enumerate(self.source_names):
            view, count = self._views[source], self._counts[source]
            tokens, repeats = int(self._lengths(source).sum()), count / len(view)
            text = join_parts(
                f"{name}: weight {self._weights[source]:g}",
                f"{number(count)} of {plural(len(view), 'sample')}",
                f"each {repeats:.2f} times an epoch"
                if repeats >= 1
                else f"the same {percent(repeats)} in every epoch",
                facts.noun == "token" and f"{short(tokens)} tokens, {percent(tokens / total)}",
                (left_out := self._left_out.get(name, 0)) and f"{left_out:,} held out elsewhere",
            )
            inner = [each.text for each in view.describe_records(facts)]
            rows += [row("", join_parts(text, *inner))]
            record[name] = {
                "weight": self._weights[source],
                "num_samples": count,
                "num_available": len(view),
                "num_tokens": tokens,
                "repeats": repeats,
                "num_left_out": left_out,
            }
        return [*rows, row(mixture=record)]
