"""Open a data set: build it, take its parts by name, and hold a share out where it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np

from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.collate import pad_samples
from trainer.data.files import progress
from trainer.data.index import LISTED_SKIPS, SKIP_CAP
from trainer.data.joined import Joined
from trainer.data.samples import Sample, num_tokens
from trainer.data.split import (
    HELD_OUT,
    HELD_OUT_NAMES,
    OWN_PART,
    TRAIN,
    HeldOutOverlap,
    Split,
    find_overlap,
    have_equal_contents,
    overlap_warning,
    split_by_seed,
    split_warnings,
)
from trainer.data.view import DataView
from trainer.plan.lengths import Lengths, picked


@final
@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The data of a run."""

    train: DataView  # what is trained on
    # What is evaluated on by name: the run's own part first, then what of it is of each source
    held_out: Mapping[str, DataView]
    split: Split  # how they were parted

    def evaluating(
        self, name: str, data: DataView, key: str, world: World, *, compares: bool
    ) -> DataSource:
        """Add samples to evaluate on, which a key of the config gives. Collective.

        With `compares` they are looked for in training, and those that are there are a warning.
        """
        split, found = self.split, None
        if compares:
            found = HeldOutOverlap(**world.on_main(lambda: asdict(find_overlap(self.train, data))))
            warnings = *split.warnings, *overlap_warning(key, found, self.train)
            split = replace(split, warnings=warnings)
        if name == OWN_PART:
            split = replace(split, rule=f"the samples of {key}", holdout=None, overlap=found)
        else:
            split = replace(split, sets={**split.sets, name: found})
        return replace(self, held_out={**self.held_out, name: data}, split=split)


@final
@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """How a data set is built and parted."""

    build: Callable[..., Any]  # builds it; takes `split` where `takes_split`
    name: str  # of its class, for messages
    takes_split: bool  # whether it is built for each part, by an argument `split`
    is_part: bool  # whether it is one part, as typed, whatever others it has
    holdout: float  # share held out where it brings no parts of its own
    split_seed: int  # selects which samples
    skips: bool  # leave samples out that cannot be read, which the class does not
    seed: int  # the run's; what samples draw while they are looked for

    def open(self, world: World, *, compares: bool) -> DataSource:
        """Build the data, once where they give their parts, and hold a share out. Collective.

        With `compares` samples are looked for on both sides.
        """
        parts, rule = self._parts(world)
        asked, warnings = parts[0].facts.holdout, tuple[str, ...]()
        if len(parts) == 1:
            whole, drawn = parts[0], (self.holdout, self.split_seed)
            parts = [split_by_seed(whole, side, *drawn) for side in (TRAIN, HELD_OUT)]
            rule, asked = "samples drawn by data.split_seed", self.holdout
            if self.takes_split:
                warnings = (
                    f"data: both parts of {self.name} are the same {len(whole)} samples, so "
                    f"data.holdout={asked:g} of them is held out; for none, type data.holdout=0",
                )
        train, rest = parts
        split = Split(rule=rule, holdout=asked, seed=self.split_seed, warnings=warnings)
        if not len(rest) or self.holdout == 0:
            if asked and self.holdout:
                nothing = (
                    f"data.holdout={asked:g}: nothing is held out, so nothing is evaluated "
                    f"({rule}); divide the data into more and smaller pieces, or name other data "
                    "in eval.sets"
                )
                split = replace(split, warnings=(*warnings, nothing))
            return DataSource(train=train, held_out={}, split=split)
        if compares:
            found = world.on_main(lambda: asdict(find_overlap(train, rest)))
            split = replace(split, overlap=HeldOutOverlap(**found))
        split = replace(split, warnings=(*warnings, *split_warnings(split, train, rest)))
        held_out = {OWN_PART: rest}
        for name, places in rest.sources.items():
            if len(places):
                of_source = partial(picked, places)
                held_out[name] = DataView(rest, len(places), of_source, f"source {name}")
        return DataSource(train=train, held_out=held_out, split=split)

    def open_all(self, world: World) -> DataSource:
        """Give every sample to be evaluated on: all parts, in turn. Collective."""
        parts, _ = self._parts(world)
        parts = [*filter(len, parts)] or parts[:1]
        every = parts[0]
        if len(parts) > 1:
            first, second = (part.facts.original_ids for part in parts)
            # Each side may number its own files from 0
            shares_ids = first is None or second is None or np.isin(first, second).any()
            named = dict(zip((TRAIN, HELD_OUT), parts, strict=True))
            every = DataView(Joined(named, keeps_ids=not shares_ids))
        split = Split(rule="all of them", holdout=None, seed=self.split_seed)
        held_out = dict[str, DataView]()
        if len(every):
            held_out[OWN_PART] = every
        return DataSource(train=every, held_out=held_out, split=split)

    def _parts(self, world: World) -> tuple[list[DataView], str]:
        """Build what the data set brings: one or two parts, and by what."""
        if self.takes_split:
            train, rule = self.build(split=TRAIN), "parts of the data set itself"
            try:
                built: Sequence[Any] = [train, self.build(split=HELD_OUT)]
            except ConfigError as error:
                hint = "to hold out a share of one part, type data.split=NAME"
                raise ConfigError(*(f"{fault}; {hint}" for fault in error.faults)) from error
        else:
            built, rule = named_parts(self)
        views = [*map(DataView, built)]
        rule = views[0].facts.split_rule or rule
        # Where `split` is a mere label, all that is held out by it would be trained on.
        if self.takes_split and world.on_main(partial(have_equal_contents, *views)):
            views = views[:1]
        if self.skips:
            views = readable(views, self.seed, world)
        return views, rule


def named_parts(spec: SourceSpec) -> tuple[Sequence[Any], str]:
    """Build a data set, and take the parts for training and evaluation by their names.

    It gives them by a method `splits() -> Mapping[str, Dataset]`, or is such a mapping itself, as a
    `DatasetDict` is; else it is one part.
    """
    built = spec.build()
    splits = getattr(built, "splits", None)
    parts = splits() if callable(splits) and not spec.is_part else built
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        return [built], ""
    names = [TRAIN, *(name for name in HELD_OUT_NAMES if name in parts)][:2]
    if len(parts) == 1:
        names = [*parts]
    elif TRAIN not in parts:
        raise DataError(
            f"data: {spec.name} gives the parts {', '.join(parts) or 'none'}: call one of them "
            "train, or type which to take: data.split=NAME, where it takes `split`"
        )
    elif len(names) == 1 and parts is not built:
        raise DataError(
            f"data: splits of {spec.name} gives {', '.join(parts)}: call the held-out part one of "
            f"{', '.join(HELD_OUT_NAMES)}"
        )
    for name in names:
        if not isinstance(parts[name], Sized):
            raise DataError(
                f"data: {spec.name}: part {name!r} is a {type(parts[name]).__name__}, which has "
                "no length; load it whole, without streaming=True"
            )
    return [parts[name] for name in names], f"parts {' and '.join(names)} of the data set"


def readable(datasets: Sequence[DataView], seed: int, world: World) -> list[DataView]:
    """Leave out of data sets the samples that cannot be read: `data.on_bad=skip`. Collective.

    The main rank reads every sample once before the first step, and what cannot be read is no
    sample: order, lengths, plan and normalizer are those of a data set without it, on every rank
    and in every replay. A sample that is sound then and cannot be read later ends the run: steps
    that leave it out would not be those of a resumed run.

    Bad is a sample that raises, is no mapping to tensors, is empty or of another length than
    `lengths` says, or has other fields, dtypes or dimensions than the first sound one. The first
    data set is the training data, whose view counts what was left out of all. What samples draw
    here is what they draw in the first epoch. A DataError where more than `SKIP_CAP` of a data set
    is bad; one sample is always allowed.
    """
    found = world.on_main(lambda: [_read_all(dataset, seed) for dataset in datasets])
    views, bad = list[DataView](), list[str]()
    for dataset, (faults, lengths) in zip(datasets, found, strict=True):
        if dataset.facts.lengths is None:
            dataset.lengths = Lengths(np.array(lengths, dtype=np.int64))
        view, positions = dataset, list[int]()
        for position, fault in faults:
            positions.append(position)
            bad.append(fault)
        if positions:
            sound = np.delete(np.arange(len(dataset)), positions)
            view = DataView(dataset, len(sound), partial(picked, sound), f"without {positions}")
        views.append(view)
    # What a data set itself passes over, its other split counts as well.
    views[0].num_skipped = datasets[0].num_skipped + len(bad)
    views[0].skipped = [*bad, *datasets[0].skipped][:LISTED_SKIPS]
    return views


def _read_all(dataset: DataView, seed: int) -> tuple[list[tuple[int, str]], list[int]]:
    """Read every sample once; gives what is bad, by position, and all lengths."""
    bad: list[tuple[int, str]] = []
    lengths = [1] * len(dataset)
    first: tuple[int, Sample] | None = None
    most = max(1, int(SKIP_CAP * len(dataset)))
    label = f"reading {dataset.kind} once (data.on_bad=skip)"
    with dataset.isolated_rng(), progress(label, len(dataset)) as advance:
        for i in range(len(dataset)):
            try:
                sample = dataset.read(i, seed=seed, epoch=0)
                lengths[i] = _checked_length(dataset, i, sample, first)
                first = first or (i, sample)
            except DataError as error:
                bad.append((i, str(error).removeprefix("data: ")))
            if len(bad) > most:
                raise DataError(
                    f"data: {len(bad)} of the first {i + 1} samples are bad, more than the "
                    f"{SKIP_CAP:.0%} of {len(dataset)} that data.on_bad=skip allows; "
                    f"the first: {bad[0][1]}"
                )
            advance()
    return bad, lengths


def _checked_length(
    dataset: DataView, i: int, sample: Sample, first: tuple[int, Sample] | None
) -> int:
    """Count the tokens of a sample, 1 where it has none; a DataError where it cannot be used."""
    count = num_tokens(sample)
    if count == 0:
        raise DataError(f"{dataset.name_of(i)} is empty")
    if dataset.facts.collate is None:
        if dataset.facts.lengths is not None:
            dataset.check_lengths([i], [sample])
        if first is not None:
            pad_samples((first[1], sample), (), 0, lambda k: dataset.name_of((first[0], i)[k]))
    return count or 1
