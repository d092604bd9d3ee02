"""What is done for data sets that bring no split and no fingerprint of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import numpy as np

from trainer.core.bits import bits_of
from trainer.core.errors import DataError, TrainError
from trainer.data.holdout import HELD_OUT, check_split, held_out_mask
from trainer.data.loader import lengths_of
from trainer.data.samples import (
    Samples,
    Selection,
    faults_of,
    kept_generators,
    offered,
    read_sample,
)
from trainer.plan.cut import IntArray

PROBES = 64
"""Samples that stand for the contents of a data set."""

_faults: ContextVar[list[str] | None] = ContextVar("_faults", default=None)


def split_by_seed(dataset: Samples, split: str, holdout: float, seed: int) -> SeededSplit:
    """Take one side of a data set that brings no split: `holdout` of its samples, or the rest.

    Args:
        dataset: all samples.
        split: `train` or `held_out`.
        holdout: share held out, at least one sample; 0 leaves `held_out` empty.
        seed: selects which.

    Returns:
        A view in the data set's own order; both sides of one call share its measured lengths.

    Raises:
        ConfigError: `split` or `holdout` is out of range.
        DataError: there is no sample.
    """
    check_split(split, holdout)
    if len(dataset) == 0:
        raise DataError(f"data: {type(dataset).__name__} holds no samples")
    mask = held_out_mask(np.arange(len(dataset), dtype=np.uint64), holdout, seed)
    ids = np.flatnonzero(mask if split == HELD_OUT else ~mask)
    return SeededSplit(dataset, ids, f"{split}|{holdout!r}|{seed}")


@final
class SeededSplit(Selection):
    """One side of a data set.

    Args:
        dataset: all samples.
        ids: `(samples,)`, those that this side holds.
        settings: what selected them, for the fingerprint.
    """

    def __init__(self, dataset: Samples, ids: IntArray, settings: str) -> None:
        super().__init__(dataset, ids)
        self._settings = settings

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sample, `(samples,)`; see `lengths_of`."""
        lengths: IntArray = lengths_of(self.dataset)[self.ids]
        return lengths

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the data set's fingerprint and what selected the samples."""
        whole = fingerprint_of(self.dataset)
        return hashlib.sha256(f"{whole}|{self._settings}".encode()).hexdigest()


def fingerprint_of(dataset: Samples) -> str:
    """Give what a checkpoint remembers of its data: its `fingerprint`, or else what can be seen.

    Without a `fingerprint` of its own, a data set counts as changed when its class name, its number
    of samples, any of their lengths or, where reading draws nothing, the contents of any of up to
    `PROBES` samples changes.
    """
    own, kind = offered(dataset, "fingerprint"), type(dataset)
    if own is not None:
        with faults_of(f"`fingerprint` of {kind.__name__}"):
            return str(own() if callable(own) else own)
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}|{len(dataset)}|".encode())
    digest.update(lengths_of(dataset).astype("<i8").tobytes())
    digest.update(_contents(dataset))
    return digest.hexdigest()


@contextmanager
def unread() -> Iterator[list[str]]:
    """Hear of samples that fingerprints were to be made of and that could not be read.

    Yields:
        Why each of them could not; grows inside the block.
    """
    faults: list[str] = []
    token = _faults.set(faults)
    try:
        yield faults
    finally:
        _faults.reset(token)


def _contents(dataset: Samples) -> bytes:
    """Digest samples spread evenly over a data set; nothing where two readings differ."""
    ids = np.unique(np.linspace(0, len(dataset) - 1, min(PROBES, len(dataset)), dtype=np.int64))
    with kept_generators():
        once, again = (_digest(dataset, ids, seed) for seed in (0, 1))
    return once if once == again else b""


def _digest(dataset: Samples, ids: IntArray, seed: int) -> bytes:
    digest = hashlib.sha256()
    for i in ids.tolist():
        try:
            sample = read_sample(dataset, i, seed=seed, epoch=0)
        except TrainError as error:
            # What cannot be read ends the run where it is met.
            faults = _faults.get()
            if faults is not None:
                faults.append(str(error))
            continue
        for name, tensor in sorted(sample.items()):
            digest.update(f"{i}|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(bits_of(tensor.cpu()).numpy().data)
    return digest.digest()
