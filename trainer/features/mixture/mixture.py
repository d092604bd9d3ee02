"""Mix data sets: of each as many samples as its weight says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil, floor
from typing import Any, Literal, cast, final

import numpy as np
import torch

from trainer.config.components import Sources, SourceStages
from trainer.config.messages import did_you_mean_name, line
from trainer.core.errors import ConfigError
from trainer.core.format import number, percent, plural, short
from trainer.core.rows import Row, RunFacts, join_parts, row
from trainer.data.collate import WEIGHT
from trainer.data.joined import Counts, Joined, MixtureSource
from trainer.data.samples import SOURCE, DataFacts, KeyArray, Sample, num_tokens
from trainer.data.split import HELD_OUT, TRAIN
from trainer.data.view import DataView
from trainer.features.mixture.schedule import SourceSchedule, nearest_counts
from trainer.plan.lengths import picked

_NONE = np.zeros(0, dtype=np.uint64)


@final
class Mixture:
    """Samples of several data sets in the shares of their weights.

    With weights by stages a `SourceSchedule` draws them, and an epoch is as many samples as all
    sources have. Else an epoch takes `N_s = N w_s / sum(w)` samples of source `s`, rounded by the
    largest remainder. Under `first_exhausted` the length of the epoch, `N`, is the most that
    repeats no sample; under `all_exhausted` the least that leaves none out. Of a source with more
    samples those at even distances are taken, the same in each epoch; one with fewer begins anew.
    The order in which the run shuffles an epoch, source and all, follows from (seed, epoch) alone.
    What is held out of each source is evaluated once, by itself and together, and trained on in no
    other one.

    Args:
        sources: by name, opened.
        stopping: `first_exhausted` or `all_exhausted`.
        weights: by source, in stages by the samples before each.

    Raises:
        ConfigError: an epoch would have no sample of a source.
    """

    @staticmethod
    def check_sources(params: Mapping[str, Any]) -> None:
        """Refuse stages that do not fit the sources, before these are opened."""
        stages, sources = params.get("weights"), params["sources"]
        if stages is not None and (text := _stages_fault(stages, sources)):
            raise ConfigError(line("data.weights", stages, text))
        if stages is not None and params.get("stopping") == "all_exhausted":
            text = "data.weights has stages, and no epoch ends with a source; leave it out"
            raise ConfigError(line("data.stopping", "all_exhausted", text))

    def __init__(
        self,
        sources: Sources,
        stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
        weights: SourceStages | None = None,
    ) -> None:
        opened = cast("Mapping[str, MixtureSource]", sources)  # as they come
        self._sources = _without_held_out(opened)
        sizes = {name: len(source.train) for name, source in self._sources.items()}
        # By the decimals that were typed: as a float 0.1 is no tenth, and shares were not exact.
        shares = {name: Fraction(str(s.weight)) for name, s in self._sources.items()}
        self.counts, self._schedule = sizes, None
        if weights is None:
            self.counts = counts_by_weight(sizes, shares, stopping)
        for name, count in self.counts.items():
            if self._sources[name].train.facts.augment:
                text = "a mixture changes no samples; leave it out"
                raise ConfigError(f"data.sources.{name}.augment: {text}")
            if count == 0 and weights is not None:
                raise ConfigError(f"data.sources.{name}: has no sample to train on; leave it out")
            if count == 0:
                text = f"none of its samples is in an epoch of {sum(self.counts.values())}"
                remedy = "raise it, or type data.stopping=all_exhausted"
                weight = f"data.sources.{name}.weight={float(shares[name]):g}"
                raise ConfigError(f"{weight}: {text}; {remedy}")
        if weights is not None:
            self._schedule = SourceSchedule(sizes, weights)

    def splits(self) -> dict[str, MixturePart]:
        """Give what is trained on, with repeats, and what is held out, once."""
        train, held_out = dict[str, DataView](), dict[str, DataView]()
        for name, source in self._sources.items():
            train[name] = source.train
            if source.held_out is not None:
                held_out[name] = source.held_out
        trained = MixturePart(train, self.counts, self._sources, self._schedule, is_trained=True)
        return {TRAIN: trained, HELD_OUT: MixturePart(held_out, None, self._sources)}


def _stages_fault(
    stages: Mapping[int, Mapping[str, float]], sources: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Say what is wrong with weights by stages; None where they fit the sources."""
    drawn = set[str]()
    if [*stages] != sorted({0, *stages}):
        return "stages have to begin at 0, and stand in their order: {0: {...}, ...}"
    for begin, weights in stages.items():
        for name, weight in weights.items():
            near = did_you_mean_name(name, sources)
            if name not in sources:
                return f"{name} is no source of data.sources" + (near and f".{near}")
            drawn.update([name] * (weight > 0))
        if not any(weights.values()):
            return f"the stage at {begin} draws from no source; give one a weight above 0"
    for name, source in sources.items():
        if "weight" in source:
            return f"data.sources.{name}.weight is typed, too; leave one of the two out"
        if name not in drawn:
            return f"no stage draws from {name}; leave data.sources.{name} out"
    return None


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
    length = floor(min(epochs)) if stopping == "first_exhausted" else ceil(max(epochs))
    return nearest_counts(length, weights)


@final
class MixturePart(Joined):
    """Samples of several sources, one source after the other.

    Without `counts` every sample is taken once; the `sources` are for messages. Samples that are
    trained on are marked by their source, for its loss.
    """

    def __init__(
        self,
        views: Mapping[str, DataView],
        counts: Counts | None,
        sources: Mapping[str, MixtureSource],
        schedule: SourceSchedule | None = None,
        *,
        is_trained: bool = False,
    ) -> None:
        super().__init__(views, counts, keeps_ids=counts is None)
        self._sources, self._schedule, self._is_trained = sources, schedule, is_trained
        self._weight_dims: int | None = None
        for view in views.values():
            with view.isolated_rng():
                weight = view.read(0, seed=0, epoch=0).get(WEIGHT) if len(view) else None
            if weight is not None:
                self._weight_dims = weight.dim()

    def facts(self) -> DataFacts:
        """Add which sample is of which source."""
        return replace(
            super().facts(),
            describe_records=self._describe,
            source_names=self._names,
            # 2 bytes for each sample of an epoch
            source_ids=np.repeat(np.arange(len(self._names), dtype=np.int16), self._counts),
            split_rule="of each source as of data of its own",
            drawn=self._schedule,
        )

    def __getitem__(self, i: int) -> Sample:
        """Give a sample as its source does."""
        fields, shape = dict(super().__getitem__(i)), tuple[int, ...]()
        if (count := num_tokens(fields)) is not None:
            shape = (count,)
        # Beside those of a source that says it, a sample counts once.
        if self._weight_dims is not None and WEIGHT not in fields:
            fields[WEIGHT] = torch.ones(shape[: self._weight_dims], dtype=torch.float32)
        # A mark for each token, or one where a sample has none
        if self._is_trained:
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
        for place, name in enumerate(self._names):
            view, count, source = self._views[place], self._counts[place], self._sources[name]
            tokens, repeats = int(self._lengths_of(place).sum()), count / len(view)
            often = f"each {repeats:.2f} times an epoch"
            if repeats < 1:
                often = f"the same {percent(repeats)} in every epoch"
            of_epoch = f"weight {source.weight:g}, {number(count)} of "
            if self._schedule is not None:
                of_epoch, often = "", ""
            text = join_parts(
                f"{name}: {of_epoch}{plural(len(view), 'sample')}",
                often,
                facts.noun == "token" and f"{short(tokens)} tokens, {percent(tokens / total)}",
                source.num_left_out and f"{source.num_left_out:,} held out elsewhere",
            )
            inner = [each.text for each in view.facts.describe_records(facts)]
            rows += [row("", join_parts(text, *inner))]
            record[name] = {
                "weight": source.weight,
                "num_samples": count,
                "num_available": len(view),
                "num_tokens": tokens,
                "repeats": repeats,
                "num_left_out": source.num_left_out,
            }
        if self._schedule is not None:
            rows += self._schedule.rows(self._names)
        return [*rows, row(mixture=record)]
