"""Define what a data set has, make tensors of its samples, and name the one that is at fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core.errors import DataError, DoesNotFitError, TrainError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.user_code import described
from trainer.core.world import rng_key
from trainer.plan.cut import IntArray
from trainer.plan.permutation import below, mixed

Sample = Mapping[str, Tensor]
INPUT_IDS = "input_ids"
PIXEL_VALUES = "pixel_values"
"""What models of a hub call an image, `(channels, height, width)`, and ours too."""
SOURCE = "source:"
"""What the name of a field begins with that marks the samples of a source, or all their tokens, by
True: the loss of each has a figure in training."""
KeyArray = npt.NDArray[np.uint64]

TRAIN = "train"
HELD_OUT = "held_out"
HELD_OUT_NAMES = (HELD_OUT, "validation", "val", "valid", "dev", "eval", "test")
"""What a held-out part may be called, the first one first, beside one called `train`."""

HOLDOUT = 0.05
"""Share that is held out where nobody says."""


class Samples(Protocol):
    """A data set: two methods, and attributes that it may have beside them.

    The attributes are optional, and `DataView.optional` is the one place that reads them:

    * `lengths`: `(samples,)` integers, the tokens of each sample; else they are measured.
    * `collate`: `collate(samples) -> fields`, in place of padding.
    * `fingerprint`: a string, or a method that gives one; changes where the contents do.
    * `splits`: `splits() -> Mapping[str, Samples]`, its parts by name, one of them `train`.
    * `vocab_size`, `num_classes`: token ids, and labels, are below them.
    * `pad_token_id`: what `input_ids` are padded with, in place of 0.
    * `special_tokens`: of the class; tokens that the run's tokenizer is given where it lacks them.
    * `augment`: `augment(sample) -> sample`, what changes a sample that is trained on, with draws
      of its own for each sample and epoch.
    * `draws_randomness`: False where reading draws no random numbers, which saves seeding.
    * `original_ids`: `(samples,)`, the ids that a person reads, of data that split themselves.
    * `num_skipped`, `skipped`: how many records were bad and left out, and why the first were.
    * `source_names`, `source_ids`: names of what the samples come from, and `(samples,)` integers,
      the number of each; what is held out of each has figures of its own. `name_of(i)` names a
      sample for a message.
    * `split_rule`, `holdout`: of data that split themselves: by what, in words, and the share that
      was asked to be held out.
    * `contents`: `(samples,)` integers, which samples of equal documents share: a mixture trains on
      none that another source holds out.
    * `decode`: `decode(ids) -> str`, the text of some tokens, and `label_names`, those of classes
      in their order: for samples that a person is shown.
    * `prompt`: `prompt(text) -> (ids, ends)`, the tokens that a sample of a text begins with, and
      those of which each one ends it: for `log.generate`, which decodes what follows.
    * `num_cut`: tokens that `max_length` left out.
    * `describe_records`: `describe_records(facts) -> Sequence[Row]`, rows for the start block: what
      the records were recognised as, and how many of them are no samples.
    * `unused`: arguments that were given and do nothing with these data, each with why, in words;
      where they were typed they are refused.
    * `byte_entropies`: `byte_entropies(places)`, what the held-out loss of a run is compared with
      over the same samples, those at these places of the held-out part: a data class of floats.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Mapping[str, Any]: ...


def without_marks(fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Leave out the fields that say where samples come from."""
    return {name: field for name, field in fields.items() if not name.startswith(SOURCE)}


def image_field(sample: Sample) -> str | None:
    """Name the first field that is an image: one or three channels of height and width."""
    images = (name for name, field in sample.items() if field.dim() == 3 and len(field) in (1, 3))  # noqa: PLR2004
    return next(images, None)


def num_tokens(sample: Sample) -> int | None:
    """Count the tokens of a sample; None where it has no one-dimensional `input_ids`."""
    tokens = sample.get(INPUT_IDS)
    return tokens.size(0) if tokens is not None and tokens.dim() == 1 else None


def as_tensors(fields: Mapping[Any, Any], place: Callable[[], str]) -> dict[str, Tensor]:
    """Turn fields into dense tensors; arrays, numbers and lists of numbers are converted."""
    tensors = {}
    for name, value in fields.items():
        tensor, why = (value, "") if isinstance(value, Tensor) else _converted(value)
        if tensor is None or tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
            raise DataError(
                f"data: {place()}: field {name!r} is a {type(value).__name__}, which cannot "
                f"become a dense tensor{why}; return a dense tensor, or leave it out"
            )
        tensors[str(name)] = tensor
    return tensors


def _converted(value: object) -> tuple[Tensor | None, str]:
    """Make a tensor of a value, or say why not."""
    if not isinstance(value, int | float | complex | list | tuple | np.ndarray | np.generic):
        return None, ""
    if isinstance(value, np.ndarray):
        if not value.dtype.isnative or min(value.strides, default=0) < 0:
            value = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        elif not value.flags.writeable:
            value = value.copy()  # PyTorch has no read-only tensors, and warns
    try:
        return torch.as_tensor(value), ""
    except (TypeError, ValueError, RuntimeError) as error:
        return None, f" ({' '.join(str(error).split()):.99})"


def seed_cpu_draws(key: int) -> None:
    """Seed PyTorch's CPU generator, NumPy's legacy one, and Python's."""
    # torch.manual_seed would reset the generators of every GPU too.
    torch.default_generator.manual_seed(key)
    # 32 bits, and not those that PyTorch reads: a list of integers takes ten times as long.
    np.random.seed(key >> 31)
    random.seed(key)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the host's global generators at the end of the block."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def faults_of(place: str) -> Iterator[None]:
    """Raise a DataError that names the part of a data set that failed, in one line."""
    try:
        yield
    except BaseException as error:  # `sys.exit` would end the run as if it were done
        raise_fault(place, error)


def raise_fault(place: str, error: BaseException) -> NoReturn:
    """Raise what `faults_of` does: its block takes 3 us, which is much for each of many samples."""
    if isinstance(error, TrainError | KeyboardInterrupt):
        raise error
    text = f"data: {place}: "
    if is_out_of_memory(error):
        raise DoesNotFitError(
            f"{text}the host's memory ran out: {described(error)}; lower num_workers, or "
            "batch.global"
        ) from error
    raise DataError(text + described(error)) from error


def held_out_count(count: int, holdout: float) -> int:
    """Round the held-out share of `count` things; of two or more, one is on either side."""
    return 0 if holdout == 0.0 or count <= 1 else min(max(round(count * holdout), 1), count - 1)


def held_out_ids(whole: int, held_out: int, seed: int, places: IntArray) -> IntArray:
    """Give the samples at some places of the held-out side: one of each of `held_out` stretches.

    The stretches of `whole` samples differ by one in size. Both sides keep the order of the data,
    and neither is a list; `whole * held_out` is below 2^63.
    """
    begins, ends = (p * whole // held_out for p in (places, places + 1))
    draws = mixed(places.astype(np.uint64) ^ np.uint64(rng_key("holdout", seed)))
    found: IntArray = begins + below(draws, (ends - begins).astype(np.uint64)).astype(np.int64)
    return found


def train_ids(whole: int, held_out: int, seed: int, places: IntArray) -> IntArray:
    """Give the samples at some places of the side that `held_out_ids` leaves."""
    # Before stretch `s` lie `floor(s whole / held_out)` samples, all but `s` of them ours.
    stretches = ((places + 1) * held_out - 1) // (whole - held_out)
    found: IntArray = places + stretches
    return found + (found >= held_out_ids(whole, held_out, seed, stretches))


def held_out_mask(keys: KeyArray, holdout: float, seed: int) -> npt.NDArray[np.bool_]:
    """Mark the samples that are held out, `(samples,)`; those that share a key stay together.

    The distinct keys are ranked by a hash of (seed, key), and the first of them are held out: the
    share is exact in keys, and which ones are held out depends neither on the order of the samples
    nor on the number of copies.
    """
    distinct = np.unique(keys)
    draws = mixed(distinct ^ np.uint64(rng_key("holdout", seed)))
    count = held_out_count(len(distinct), holdout)
    chosen = distinct[np.argsort(draws, kind="stable")[:count]]
    return np.isin(keys, chosen)
