"""What is done for data sets that bring no split and no fingerprint of their own."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from torch.utils.data import Dataset

from trainer.data.holdout import HELD_OUT, check_split, held_out_mask
from trainer.data.loader import lengths_of
from trainer.data.samples import Samples
from trainer.errors import DataError
from trainer.plan.cut import IntArray


def has_split_argument(factory: Callable[..., Any]) -> bool:
    """Whether a data set's class takes `split`, and so brings a split of its own."""
    return "split" in inspect.signature(factory).parameters


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
class SeededSplit(Dataset[Mapping[str, Any]]):
    """Some samples of a data set; what else the data set offers is passed on.

    Args:
        dataset: all samples.
        ids: `(samples,)`, those that this side holds.
        settings: what selected them, for the fingerprint.
    """

    def __init__(self, dataset: Samples, ids: IntArray, settings: str) -> None:
        self.dataset = dataset
        self.ids = ids
        self._settings = settings

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        return self.dataset[int(self.ids[i])]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the data set has
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

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

    def origin_of(self, i: int) -> tuple[Samples, int]:
        """Tell which sample of the data set sample `i` is."""
        return self.dataset, int(self.ids[i])


def fingerprint_of(dataset: Samples) -> str:
    """Give what a checkpoint remembers of its data: `fingerprint`, or else the class and sizes.

    Without a `fingerprint` of its own, a data set counts as changed when its class name, its
    number of samples or any of their lengths changes.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    kind = type(dataset)
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}|{len(dataset)}|".encode())
    digest.update(lengths_of(dataset).astype("<i8").tobytes())
    return digest.hexdigest()
