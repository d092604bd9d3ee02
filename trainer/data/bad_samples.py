"""Leave samples that cannot be read out of data sets, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from trainer.core.errors import DataError
from trainer.core.world import World
from trainer.data.collate import pad_samples
from trainer.data.files import progress
from trainer.data.index import LISTED_SKIPS, SKIP_CAP
from trainer.data.samples import Sample, num_tokens
from trainer.data.view import DataView
from trainer.plan.lengths import Lengths, picked


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
