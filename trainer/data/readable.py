"""`data.on_bad=skip` for data sets that cannot pass over a bad sample themselves.

Every sample is read once before the first step, and what cannot be read is no sample: order,
lengths, plan and normalizer never hear of it, on every rank and in every replay alike. A sample
that is sound then and cannot be read later ends the run; its steps would not be those of a resumed
one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from trainer.core.errors import DataError
from trainer.core.world import World
from trainer.data.collate import INPUT_IDS, Sample, pad
from trainer.data.files import progress
from trainer.data.index import LISTED_SKIPS, SKIP_CAP
from trainer.data.limits import check_length
from trainer.data.loader import lengths_of
from trainer.data.samples import Samples, Selection, isolated_rng, name_of, offered, read_sample
from trainer.data.split import fingerprint_of
from trainer.plan.cut import IntArray


def readable(datasets: Sequence[Samples], seed: int, world: World) -> list[ReadableSamples]:
    """Leave out of data sets the samples that cannot be read, as the main rank finds. Collective.

    Bad is a sample that raises, is no mapping to tensors, is empty or of another length than
    `lengths` says, or has other fields, dtypes or dimensions than the first sound one.

    Args:
        datasets: the training data, and what else there is.
        seed: the run's; what samples draw here is what they draw in the first epoch.
        world: all ranks.

    Returns:
        A view of each; the first one tells what was left out of all of them.

    Raises:
        DataError: more than `SKIP_CAP` of a data set is bad; one sample is always allowed.
    """

    def find() -> list[dict[str, Any]]:
        return [_judged(dataset, seed) for dataset in datasets]

    views = [
        ReadableSamples(dataset, **judged)
        for dataset, judged in zip(datasets, world.on_main(find), strict=True)
    ]
    views[0].tell(views[1:])
    return views


@final
class ReadableSamples(Selection):
    """The samples of a data set that can be read.

    Args:
        dataset: all samples.
        bad: index of each that cannot be read, and why.
        lengths: of all samples, in tokens; None where the data set states them.

    Attributes:
        lengths: `(samples,)`, their tokens.
        num_skipped: samples left out, and what the data set itself passed over.
        skipped: the first of them, each with the reason.
    """

    def __init__(
        self, dataset: Samples, bad: Sequence[tuple[int, str]], lengths: Sequence[int] | None
    ) -> None:
        self._bad = [i for i, _ in bad]
        super().__init__(dataset, np.delete(np.arange(len(dataset)), self._bad))
        whole = lengths_of(dataset) if lengths is None else np.array(lengths, dtype=np.int64)
        self.lengths: IntArray = whole[self.ids]
        self.num_skipped = len(bad) + int(getattr(dataset, "num_skipped", 0))
        faults = [fault for _, fault in bad]
        self.skipped = [*faults, *getattr(dataset, "skipped", ())][:LISTED_SKIPS]

    def tell(self, others: Sequence[ReadableSamples]) -> None:
        """Count what was left out of other data sets too."""
        for other in others:
            # What the data set itself passed over, its other split counts as well.
            self.num_skipped += len(other._bad)
            self.skipped += other.skipped[: min(len(other._bad), LISTED_SKIPS - len(self.skipped))]

    @property
    def fingerprint(self) -> str:
        """That of the data set, where all of it can be read; else SHA-256 with what cannot."""
        if not self._bad:
            return fingerprint_of(self.dataset)
        # Without a fingerprint of its own a data set would be measured, bad samples and all.
        own = fingerprint_of(self.dataset) if hasattr(self.dataset, "lengths") else len(self._bad)
        digest = hashlib.sha256(f"{own}|{self._bad}".encode())
        digest.update(self.lengths.astype("<i8").tobytes())
        return digest.hexdigest()


def _judged(dataset: Samples, seed: int) -> dict[str, Any]:
    """Read every sample, and tell which are bad, and how long all are where nothing states it.

    Raises:
        DataError: too many are bad.
    """
    bad: list[tuple[int, str]] = []
    lengths: list[int] = []
    most = max(1, int(SKIP_CAP * len(dataset)))
    label = f"reading {len(dataset)} samples of {type(dataset).__name__} once (data.on_bad=skip)"
    with isolated_rng(dataset), progress(label, len(dataset)) as advance:
        for i, (length, fault) in enumerate(_read(dataset, seed)):
            lengths.append(length)
            if fault:
                bad.append((i, fault))
            if len(bad) > most:
                raise DataError(
                    f"data: {len(bad)} of the first {i + 1} samples are bad, more than the "
                    f"{SKIP_CAP:.0%} of {len(dataset)} that data.on_bad=skip passes over; "
                    f"the first: {bad[0][1]}"
                )
            advance(1)
    return {"bad": bad, "lengths": None if hasattr(dataset, "lengths") else lengths}


def _read(dataset: Samples, seed: int) -> Iterator[tuple[int, str]]:
    stated = lengths_of(dataset) if hasattr(dataset, "lengths") else None
    model: tuple[int, Sample] | None = None
    for i in range(len(dataset)):
        limit = None if stated is None else int(stated[i])
        try:
            sample = read_sample(dataset, i, seed=seed, epoch=0)
            length = _length(dataset, i, sample, limit)
            if model is not None and getattr(dataset, "collate", None) is None:
                ids = (model[0], i)
                pad((model[1], sample), (), 0, lambda place, ids=ids: name_of(dataset, ids[place]))  # type: ignore[misc]
        except DataError as error:
            yield 1 if limit is None else limit, str(error).removeprefix("data: ")
            continue
        model = model or (i, sample)
        yield length, ""


def _length(dataset: Samples, i: int, sample: Sample, stated: int | None) -> int:
    """Give the length of a sample, as planning counts it.

    Raises:
        DataError: it is empty, or not as long as was stated.
    """
    tokens = sample.get(INPUT_IDS)
    counted = len(tokens) if tokens is not None and tokens.dim() == 1 else None
    if counted == 0:
        raise DataError(f"{name_of(dataset, i)} is empty")
    if stated is not None and counted is not None and offered(dataset, "collate") is None:
        check_length(dataset, i, [counted], stated)
    return stated or counted or 1
