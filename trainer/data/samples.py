"""Define samples and what is known of them, make tensors of them, and name the one at fault."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core.errors import DataError, DoesNotFitError, TrainError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.rows import Row, RunFacts
from trainer.core.user_code import described

Sample = Mapping[str, Tensor]
INPUT_IDS = "input_ids"
PIXEL_VALUES = "pixel_values"
"""What models of a hub call an image, `(channels, height, width)`, and ours too."""
CHARACTERS = ("first_character", "end_character")
"""Fields that say of each token which characters of a text it stands for, the first and the one
behind the last; -1 where it is of another text, or of none."""
SOURCE = "source:"
"""What the name of a field begins with that marks the samples of a source, or all their tokens, by
True: the loss of each has a figure in training."""
LabelKind = Literal["classes", "numbers", "flags"]
"""What labels are: a class for each row of the logits; a number, or 0 or 1, for each logit."""
KeyArray = npt.NDArray[np.uint64]


@final
@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """A record of the data as a person counts them, whatever samples it became."""

    number: int  # from 0
    place: str | None = None  # its file and line, or what else names it
    samples: Sequence[int] = ()  # where its samples are in the data; several where it was divided
    why_none: str | None = None  # where it has no sample
    # What its own classes stand for, as the choices of a question
    classes: Sequence[str] | None = None
    text: str | None = None  # what characters are counted in, as the context of a question
    # The text or tags that the file has, where its records are without them, too
    reference: Any = None


class Samples(Protocol):
    """A data set: two methods, and one that says what is known of it; see `DataFacts`."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Mapping[str, Any]: ...


@final
@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a data set knows of its samples; what it does not know is left out.

    A data set gives them by a method `facts() -> DataFacts`, which is called once. One without that
    method may have attributes of these names. Arrays have an entry for each sample, `(samples,)`.
    """

    # Of every sample
    # Integers, the tokens of each; else they are measured
    lengths: npt.ArrayLike | None = None
    draws_randomness: bool = True  # False where reading draws nothing, which saves seeding
    # Makes fields of samples, in place of padding; it may add or cut tokens, as `lengths` counts
    collate: Callable[[Sequence[Sample]], Any] | None = None
    # Changes a sample that is trained on, with draws of its own for each sample and epoch
    augment: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    # Another one where the contents are others; a function where that takes a while
    fingerprint: str | Callable[[], str] | None = None

    # For a model
    # Token ids are below it
    vocab_size: int | None = None
    num_classes: int | None = None  # labels are below it
    # What they are, and the numbers of a row where they are numbers or flags: `num_classes` of each
    label_kind: LabelKind | None = None
    pad_token_id: int | None = None  # what `input_ids` are padded with, in place of 0
    max_length: int | None = None  # most tokens of a sample

    # For a person
    # Of classes that are words, in their order
    label_names: Sequence[str] | None = None
    class_counts: Callable[[], npt.ArrayLike] | None = None  # counts the labels of each class
    decode: Callable[[Sequence[int]], str] | None = None  # writes tokens as text
    # Writes them without special tokens, as a person reads an answer
    decode_answer: Callable[[Sequence[int]], str] | None = None
    answer_ends: Sequence[int] = ()  # tokens of which each one ends a text that is written
    # Gives the tokens that a sample of a text begins with, and those of which each one ends it
    prompt: Callable[[str], tuple[Sequence[int], Sequence[int]]] | None = None
    name_of: Callable[[int], str] | None = None  # names a sample for a message
    # Rows for the start block: what the records are, and how many of them are no samples
    describe_records: Callable[[RunFacts], Sequence[Row]] = lambda _: ()
    # What `predict` writes a line for, in the order of the files; None: each sample is a record
    predicted_records: Callable[[], Iterator[DataRecord]] | None = None
    # How records are read: `name`, and names of `columns` by role
    record_format: dict[str, Any] | None = None
    predicted_table: Path | None = None  # the file of CSV whose rows are the records
    unused: Mapping[str, str] = field(default_factory=dict)  # arguments that do nothing, and why
    num_skipped: int = 0  # records that were bad and left out
    skipped: Sequence[str] = ()  # why the first of them were
    num_cut: int = 0  # tokens that `max_length` left out
    # Of several sources: their names, and the number of each sample's
    source_names: Sequence[str] | None = None
    source_ids: npt.ArrayLike | None = None
    # Gives, by the seed, the samples at places of a run, in place of a permutation for each epoch
    drawn: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None = None

    # Of data that split themselves
    split_rule: str | None = None  # by what, in words
    holdout: float | None = None  # share that was asked for
    original_ids: npt.ArrayLike | None = None  # the ids that a person reads
    # Numbers that equal documents share: a mixture trains on none that another source holds out
    contents: npt.ArrayLike | Callable[[], npt.ArrayLike] | None = None
    # What the held-out loss is compared with, over held-out samples by places: a class of floats
    byte_entropies: Callable[[npt.NDArray[np.int64]], Any] | None = None


_NAMES = {each.name for each in fields(DataFacts)}
_COUNTS = {"vocab_size", "num_classes", "pad_token_id", "num_cut"}


def data_facts(dataset: object) -> DataFacts:
    """Give what a data set knows, by its method `facts` or by its attributes."""
    kind = type(dataset).__name__
    with faults_of(f"`facts` of {kind}"):
        given = getattr(dataset, "facts", None)
        stated = given() if callable(given) else None
    if callable(given):
        if isinstance(stated, DataFacts):
            return replace(stated, **_attributes(dataset, _names_below_facts(type(dataset))))
        text = f"gives a {type(stated).__name__}; return a trainer.data.samples.DataFacts"
        raise DataError(f"data: `facts` of {kind} {text}")
    return DataFacts(**_attributes(dataset, _NAMES))


def _names_below_facts(kind: type) -> Iterator[str]:
    """Name the attributes of classes that derive from the one whose method `facts` is inherited."""
    for each in kind.__mro__:
        if "facts" in vars(each):
            return
        yield from _NAMES & vars(each).keys()


def _attributes(dataset: object, names: Iterable[str]) -> dict[str, Any]:
    found, kind = dict[str, Any](), type(dataset).__name__
    for name in names:
        with faults_of(f"`{name}` of {kind}"):
            value = getattr(dataset, name, None)
            if value is not None and name in _COUNTS:
                value = operator.index(value)
        if value is not None:
            found[name] = value
    # Some classes use the words for something else.
    if not isinstance(found.get("holdout"), int | float):
        found.pop("holdout", None)
    if not isinstance(found.get("max_length"), Integral):
        found.pop("max_length", None)
    return found


def without_marks(fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Leave out the fields that say where samples come from."""
    rest = dict[str, Tensor]()
    for name, value in fields.items():
        if not name.startswith(SOURCE):
            rest[name] = value
    return rest


def image_field(sample: Sample) -> str | None:
    """Name the first field that is an image: one or three channels of height and width."""
    for name, value in sample.items():
        if value.dim() == 3 and len(value) in (1, 3):  # noqa: PLR2004
            return name
    return None


def num_tokens(sample: Sample) -> int | None:
    """Count the tokens of a sample; None where it has no one-dimensional `input_ids`."""
    tokens = sample.get(INPUT_IDS)
    return None if tokens is None or tokens.dim() != 1 else tokens.size(0)


def as_tensors(fields: Mapping[Any, Any], place: Callable[[], str]) -> dict[str, Tensor]:
    """Turn fields into dense tensors; arrays, numbers and lists of numbers are converted."""
    tensors = {}
    for name, value in fields.items():
        tensor, why = value, ""
        if not isinstance(value, Tensor):
            tensor, why = _converted(value)
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
            # PyTorch has no read-only tensors, and warns
            value = value.copy()
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
