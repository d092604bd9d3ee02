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

from trainer.core.errors import DataError, DoesNotFitError, TrainError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.world import rng_key
from trainer.plan.cut import IntArray


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


def origin_of(dataset: Samples) -> Samples:
    """Give the data set that the user wrote, of which this one may be a part."""
    while isinstance(dataset, Selection):
        dataset = dataset.dataset
    return dataset


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
        KeyboardInterrupt: as raised by the data set, or by a signal meanwhile.
        fault: the host ran out of memory.
    """
    if draws_randomness(dataset):
        seed_draws(rng_key(seed, epoch, i))
    try:
        sample: Any = dataset[i]
        fields = dict(sample.items()) if isinstance(sample, Mapping) else None
    except (TrainError, KeyboardInterrupt):
        raise
    except BaseException as error:  # `sys.exit` would end the run as if it were done
        raise fault(name_of(dataset, i), error) from error
    if fields is None:
        raise DataError(
            f"data: {name_of(dataset, i)} is a {type(sample).__name__}; "
            f"it must be a mapping from names to tensors"
        )
    tensors = {name: _as_tensor(name, value, dataset, i) for name, value in fields.items()}
    unfit = unfit_field(tensors)
    if unfit is not None:
        raise DataError(f"data: {name_of(dataset, i)}: {unfit}")
    return tensors


def unfit_field(fields: Mapping[Any, Any]) -> str | None:
    """Say which field has no name, or values that cannot be stacked; None where all are fit."""
    for name, value in fields.items():
        if not isinstance(name, str):
            return f"the field {name!r} is named by a {type(name).__name__}; names are strings"
        if value.is_meta or value.is_nested or value.layout != torch.strided:
            kind = "meta" if value.is_meta else "nested" if value.is_nested else str(value.layout)
            return f"field {name!r} is a {kind} tensor; return a dense one that holds its values"
    return None


def check_count(dataset: Samples) -> None:
    """Refuse a data set whose `__len__` fails, or gives no count.

    Raises:
        DataError: it does.
    """
    with faults_of(f"`__len__` of {type(dataset).__name__}"):
        count: Any = type(dataset).__len__(dataset)
    if not hasattr(count, "__index__") or count < 0:
        raise DataError(
            f"data: `__len__` of {type(dataset).__name__} gives {count!r}; it must be a whole "
            "number, 0 or more"
        )


def offered(dataset: Samples, name: str) -> Any:  # noqa: ANN401 - whatever it is
    """Take what a data set may offer beside its samples; None where it does not.

    Raises:
        DataError: it fails.
    """
    with faults_of(f"`{name}` of {type(origin_of(dataset)).__name__}"):
        return getattr(dataset, name, None)


@contextmanager
def faults_of(place: str) -> Iterator[None]:
    """Name the part of a data set that failed; `sys.exit` would end the run as if it were done.

    Yields:
        Nothing.

    Raises:
        TrainError: in place of what it raised; its own passes.
        KeyboardInterrupt: as raised inside.
        fault: the same.
    """
    try:
        yield
    except (TrainError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise fault(place, error) from error


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
    return f"sample {shown} of {type(origin_of(dataset)).__name__}"


def fault(place: str, error: BaseException) -> TrainError:
    """Tell a fault of the data from memory that ran out on the host while they were read."""
    if is_out_of_memory(error):
        return DoesNotFitError(
            f"data: {place}: the host's memory ran out: {described(error)}; lower num_workers, or "
            "batch.global"
        )
    return DataError(f"data: {place}: {described(error)}")


def described(error: BaseException) -> str:
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
