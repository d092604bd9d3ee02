"""Put data sets one after the other, and mix them: of each as many samples as its weight says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil, floor
from typing import Any, Literal, cast, final

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.config.components import Sources
from trainer.core.errors import ConfigError
from trainer.core.format import number, percent, plural, short
from trainer.core.rows import Row, RunFacts, join_parts, row
from trainer.data.samples import SOURCE, DataFacts, KeyArray, Sample, num_tokens
from trainer.data.split import HELD_OUT, TRAIN
from trainer.data.view import DataView
from trainer.plan.cut import IntArray
from trainer.plan.lengths import picked

Counts = Mapping[str, int]  # of samples, by part
_NONE, _NO_IDS = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)


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
            ids = np.concatenate([_NO_IDS, *own])
        return DataFacts(
            lengths=self._lengths(),
            draws_randomness=any(each.draws_randomness for each in known),
            collate=first.collate,
            fingerprint=self._fingerprint,
            vocab_size=_largest([each.vocab_size for each in known]),
            num_classes=_largest([each.num_classes for each in known]),
            pad_token_id=first.pad_token_id,
            max_length=_largest([each.max_length for each in known]),
            label_names=first.label_names,
            decode=first.decode,
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
        found = [self._lengths_of(part) for part in range(len(self._views))]
        return np.concatenate([_NO_IDS, *found])

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


@final
@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One of the data sets that are mixed, opened."""

    train: DataView
    held_out: DataView | None
    # Samples of it in an epoch are proportional to this
    weight: float
    # Samples that are in no epoch, as another source holds them out
    num_left_out: int = 0


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
        # By the decimals that were typed: as a float 0.1 is no tenth, and shares were not exact.
        weights = {name: Fraction(str(s.weight)) for name, s in self._sources.items()}
        self.counts = counts_by_weight(sizes, weights, stopping)
        for name, count in self.counts.items():
            if self._sources[name].train.facts.augment:
                text = "a mixture changes no samples; leave it out"
                raise ConfigError(f"data.sources.{name}.augment: {text}")
            if count == 0:
                text = f"none of its samples is in an epoch of {sum(self.counts.values())}"
                remedy = "raise it, or type data.stopping=all_exhausted"
                weight = f"data.sources.{name}.weight={float(weights[name]):g}"
                raise ConfigError(f"{weight}: {text}; {remedy}")

    def splits(self) -> dict[str, MixturePart]:
        """Give what is trained on, with repeats, and what is held out, once."""
        train, held_out = dict[str, DataView](), dict[str, DataView]()
        weights, left_out = dict[str, float](), dict[str, int]()
        for name, source in self._sources.items():
            train[name], weights[name] = source.train, source.weight
            left_out[name] = source.num_left_out
            if source.held_out is not None:
                held_out[name] = source.held_out
        trained = MixturePart(train, self.counts, weights, left_out, is_marked=True)
        return {TRAIN: trained, HELD_OUT: MixturePart(held_out, None, weights)}


def _without_held_out(sources: Mapping[str, MixtureSource]) -> dict[str, MixtureSource]:
    """Take out of training what any source holds out, where data number their contents.

    Each source holds out a share of its own, so that two may part a text that is in both.
    """
    held_out = [_NONE]
    for source in sources.values():
        if source.held_out is not None:
            held_out.append(_contents(source.held_out))
    of_any = np.concatenate(held_out)
    found = dict(sources)
    for name, source in sources.items():
        keeps = ~np.isin(_contents(source.train), of_any)
        if not keeps.all():
            places, digest = np.flatnonzero(keeps), hashlib.sha256(keeps.data).hexdigest()
            train = DataView(source.train, len(places), partial(picked, places), digest)
            found[name] = replace(source, train=train, num_left_out=len(keeps) - len(places))
    return found


def _contents(view: DataView) -> KeyArray:
    """Number the contents of samples, `(samples,)`; none at all where the data do not."""
    contents = view.facts.contents
    if contents is None:
        return _NONE
    if callable(contents):
        contents = contents()
    stated = np.asarray(contents)
    return stated[view.ids(np.arange(len(view)))]


def counts_by_weight(
    sizes: Mapping[str, int], weights: Mapping[str, Fraction], stopping: str
) -> dict[str, int]:
    """Give the samples of each source in an epoch; see `Mixture`."""
    total = sum(weights.values(), Fraction(0))
    epochs = [sizes[name] * total / weights[name] for name in sizes]
    length = ceil(max(epochs))
    if stopping == "first_exhausted":
        length = floor(min(epochs))
    exact, counts = dict[str, Fraction](), dict[str, int]()
    for name in sizes:
        exact[name] = length * weights[name] / total
        counts[name] = floor(exact[name])
    left = length - sum(counts.values())
    # Stable: of equal remainders the first source gets the sample.
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[:left]:
        counts[name] += 1
    return counts


@final
class MixturePart(Joined):
    """Samples of several sources, one source after the other.

    Without `counts` every sample is taken once. `weights`, and the samples `left_out` as another
    source holds them out, are for messages. Marked samples say their source, for its training loss.
    """

    def __init__(
        self,
        views: Mapping[str, DataView],
        counts: Counts | None,
        weights: Mapping[str, float],
        left_out: Mapping[str, int] | None = None,
        *,
        is_marked: bool = False,
    ) -> None:
        super().__init__(views, counts, keeps_ids=counts is None)
        self._is_marked = is_marked
        self._weights, self._left_out = [weights[name] for name in views], left_out or {}

    def facts(self) -> DataFacts:
        """Add which sample is of which source."""
        return replace(
            super().facts(),
            describe_records=self._describe,
            source_names=self._names,
            # 2 bytes for each sample of an epoch
            source_ids=np.repeat(np.arange(len(self._names), dtype=np.int16), self._counts),
            split_rule="of each source as of data of its own",
        )

    def __getitem__(self, i: int) -> Sample:
        """Give a sample as its source does."""
        fields = dict(super().__getitem__(i))
        # A mark for each token, or one where a sample has none
        if self._is_marked:
            count = num_tokens(fields)
            shape = () if count is None else (count,)
            source = self._place(i)[0]
            for place, name in enumerate(self._names):
                fields[f"{SOURCE}{name}"] = torch.full(shape, place == source)
        return fields

    def name_of(self, i: int) -> str:
        """Name a sample for a message, by its source."""
        return f"{super().name_of(i)} (data.sources.{self._names[self._place(i)[0]]})"

    def _describe(self, facts: RunFacts) -> Sequence[Row]:
        """Say how much of each source an epoch takes, and how often it repeats."""
        rows, record, total = list[Row](), dict[str, Any](), int(self._lengths().sum())
        for source, name in enumerate(self._names):
            view, count = self._views[source], self._counts[source]
            tokens, repeats = int(self._lengths_of(source).sum()), count / len(view)
            left_out = self._left_out.get(name, 0)
            often = f"each {repeats:.2f} times an epoch"
            if repeats < 1:
                often = f"the same {percent(repeats)} in every epoch"
            text = join_parts(
                f"{name}: weight {self._weights[source]:g}",
                f"{number(count)} of {plural(len(view), 'sample')}",
                often,
                facts.noun == "token" and f"{short(tokens)} tokens, {percent(tokens / total)}",
                left_out and f"{left_out:,} held out elsewhere",
            )
            inner = [each.text for each in view.facts.describe_records(facts)]
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
