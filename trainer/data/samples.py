"""Reading single samples: what a data set must be, its draws, and its faults made readable."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.errors import DataError, DoesNotFitError, TrainError
from trainer.out_of_memory import is_out_of_memory
from trainer.plan.cut import IntArray
from trainer.world import rng_key


class Samples(Protocol):
    """A data set: all that is asked of one's own.

    Optional are `lengths` (tokens per sample), `collate(samples) -> fields`, `fingerprint`,
    `vocab_size`, and `draws_randomness = False`, which saves seeding every sample.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Mapping[str, Any]: ...


class Selection(Dataset[Mapping[str, Any]]):
    """Some samples of a data set; what else the data set offers is passed on.

    Args:
        dataset: all samples.
        ids: `(samples,)`, those that are in it.
    """

    def __init__(self, dataset: Samples, ids: IntArray) -> None:
        self.dataset = dataset
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        return self.dataset[int(self.ids[i])]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the data set has
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of a file that cannot be read that it is the data's.

    Raises:
        DataError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror or error}") from error


def draws_randomness(dataset: Samples) -> bool:
    """Whether reading a sample may draw from the global generators; yes unless it says no."""
    return bool(getattr(dataset, "draws_randomness", True))


def read_sample(dataset: Samples, i: int, *, seed: int, epoch: int) -> dict[str, Tensor]:
    """Read one sample, whose draws depend on (seed, epoch, id) alone.

    Seeds PyTorch's CPU generator, NumPy's legacy one and Python's; callers that must not lose
    the state of those read inside `isolated_rng`.

    Args:
        dataset: to read from.
        i: sample id.
        seed: the run's.
        epoch: from 0.

    Returns:
        Tensors by name; arrays, numbers and lists of numbers are converted.

    Raises:
        DataError: the data set failed, or the sample is not a mapping from names to tensors;
            names the sample.
        TrainError: the data set raised one itself.
        fault: the host ran out of memory.
    """
    if draws_randomness(dataset):
        seed_draws(rng_key(seed, epoch, i))
    try:
        sample = dataset[i]
    except TrainError:
        raise
    except Exception as error:
        raise fault(name_of(dataset, i), error) from error
    if not isinstance(sample, Mapping):
        raise DataError(
            f"data: {name_of(dataset, i)} is a {type(sample).__name__}; "
            f"it must be a mapping from names to tensors"
        )
    return {name: _as_tensor(name, value, dataset, i) for name, value in sample.items()}


def seed_draws(key: int) -> None:
    """Seed PyTorch's CPU generator, NumPy's legacy one, and Python's."""
    # torch.manual_seed would reset the generators of every GPU too.
    torch.default_generator.manual_seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    random.seed(key)


@contextmanager
def isolated_rng(dataset: Samples) -> Iterator[None]:
    """Give the global generators back as they were; costs nothing for data that draws nothing."""
    with kept_generators() if draws_randomness(dataset) else nullcontext():
        yield


@contextmanager
def kept_generators() -> Iterator[None]:
    """Give the host's global generators back as they were."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def original_ids(dataset: Samples, positions: npt.ArrayLike) -> IntArray:
    """Turn positions in a split into the ids that a person reads.

    Those are the indices of the data set as the user wrote it, before any sample was held out or
    skipped; of a built-in one, which splits itself, the indices in both splits together, which it
    gives as `original_ids`. In a split that the user's data set makes itself they are positions.

    Args:
        dataset: as it is trained on or evaluated.
        positions: `(samples,)`.
    """
    ids = np.asarray(positions)
    while isinstance(dataset, Selection):
        ids = dataset.ids[ids]
        dataset = dataset.dataset
    own: IntArray | None = getattr(dataset, "original_ids", None)
    return ids if own is None else own[ids]


def name_of(dataset: Samples, i: int) -> str:
    """Name a sample for a message, by its id in the data set that the user wrote."""
    (shown,) = original_ids(dataset, [i])
    while isinstance(dataset, Selection):
        dataset = dataset.dataset
    return f"sample {shown} of {type(dataset).__name__}"


def fault(place: str, error: Exception) -> TrainError:
    """Tell a fault of the data from memory that ran out on the host while they were read."""
    if is_out_of_memory(error):
        return DoesNotFitError(
            f"data: {place}: the host's memory ran out: {described(error)}; lower num_workers, or "
            "batch.global"
        )
    return DataError(f"data: {place}: {described(error)}")


def described(error: Exception) -> str:
    """Put an exception on one line, with the place it was raised at."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"


def _as_tensor(name: str, value: object, dataset: Samples, i: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            # PyTorch has no read-only tensors, and warns.
            value = value.copy()
        if isinstance(value, int | float | list | tuple | np.ndarray | np.generic):
            return torch.as_tensor(value)
        raise TypeError("not a tensor")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data: {name_of(dataset, i)}: field {name!r} is a {type(value).__name__} that makes "
            f"no tensor; return a tensor or leave it out"
        ) from error
