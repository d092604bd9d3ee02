"""Encode records by a tokenizer, in as many processes as pay."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.config.components import Overlong
from trainer.core.errors import TrainError
from trainer.core.micro_batch import IGNORED
from trainer.core.user_code import described, quiet
from trainer.data.collate import ATTENTION_MASK, LABELS, WEIGHT
from trainer.data.documents import Ends, SampleKind, kinds_of, packed_fields
from trainer.data.lines import FAULT_COLUMN, json_object
from trainer.data.loader import begin_loading, ignore_signals
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face.formats import Format
from trainer.features.hugging_face.task import WORDS
from trainer.features.hugging_face.tokenizers import pad_token_of
from trainer.report.records import num_cores

MANY_RECORDS = 10_000
"""From here on processes are started for the work, which costs half a second."""
BATCH = 100
"""Records at a time: bounds the memory where a record is a book."""
TYPE_IDS = "token_type_ids"
LONGER = "longer than data.max_length"
"""Why records are dropped that are too long."""

OF_ANSWERS: Mapping[str, tuple[Any, str]] = WORDS["of_answers"]
"""Options that not all records have a use for: the default of each, and what it is for."""

_LARGEST = float(np.finfo(np.float32).max)
WHOLE = re.compile(r"\s*[-+]?\d+\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[-+]?(?!0\d)(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", re.ASCII)

RoleValues = Mapping[str, Any]  # values by role
RecordFields = Mapping[str, Any]
"""Numbers by field: a list, one, or rows of equal lengths."""
FieldsOf = Callable[
    ["RecordEncoder", RoleValues], "RecordFields | list[RecordFields | DroppedError]"
]
"""Gives the fields of a sample, or of several, some dropped; a ValueError where a record is bad."""


@final
@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A record as it is stored."""

    entry: bytes  # the fields
    group: bytes  # what copies of it share: its ids, whatever its labels are
    kinds: Mapping[str, SampleKind]  # of the fields


class DroppedError(ValueError):
    """A record that is sound, and is no sample; says why."""


@final
@dataclass(frozen=True, kw_only=True)
class RecordEncoder:
    """Turns records of one format into the fields of samples."""

    format: Format
    is_json: bool  # whether a record is JSON, in bytes, in a column `text`
    tokenizer: Any
    max_length: int  # most tokens of a sample
    overlong: Overlong  # what becomes of longer ones
    fields_of: FieldsOf
    options: Mapping[str, Any]  # by the names of `OF_ANSWERS`
    # Gives what copies share in place of their ids, if anything
    group_of: Callable[[RoleValues], Any] | None = None
    weighs: bool = False  # whether samples say how often they count

    def encode(self, record: Mapping[str, Any] | ValueError) -> list[Encoded | ValueError]:
        """Encode a record as it was read; a ValueError says why it is no sample."""
        if isinstance(record, ValueError):
            return [record]
        try:
            values = self.format.take(record)
            fields = self.fields_of(self, values)
            often = 1.0 if values.get(WEIGHT) is None else number_of(values, WEIGHT, least=0)
        except (TrainError, MemoryError):
            raise
        except DroppedError as error:
            return [error]
        except ValueError as error:
            return [ValueError(str(error))]
        except Exception as error:  # whatever a record holds
            return [ValueError(f"cannot be encoded ({described(error)})")]
        several = fields if isinstance(fields, list) else [fields]
        group, found = b"", list[Encoded | ValueError]()
        for each in reversed(several):
            if isinstance(each, DroppedError):
                found.append(each)
                continue
            if self.weighs:
                # First, where documents that are divided look for it
                each = {WEIGHT: 1.0, **each}  # noqa: PLW2901
                each[WEIGHT] = np.float32(often) * np.asarray(each[WEIGHT], dtype=np.float32)
            # All samples of a record stay on one side of a split, with those of its copies.
            shared = np.asarray(each[INPUT_IDS], dtype=np.int64).tobytes()
            if self.group_of is not None and (own := self.group_of(values)):
                shared = repr(own).encode()
            group = group or hashlib.blake2b(shared, digest_size=16).digest()
            found.append(Encoded(entry=packed_fields(each), group=group, kinds=kinds_of(each)))
        return found[::-1]

    def __call__(self, batch: Any) -> list[Any]:  # noqa: ANN401 - columns
        """Encode each record of a batch."""
        # The library would warn of each text that is longer than its model takes.
        with quiet():
            return [*map(self.encode, records_of(batch, is_json=self.is_json))]

    def run(self, records: Any) -> Generator[list[Encoded | ValueError]]:  # noqa: ANN401
        """Encode a `datasets.Dataset` in its order, in as many processes as pay."""
        size, num_workers = len(records), 0
        # A daemon may start no processes, and a single one is no faster.
        if size >= MANY_RECORDS and num_cores() > 1 and not current_process().daemon:
            num_workers = num_cores()
        # A range is read at once, as columns, in place of 100 records one by one.
        batches = [range(first, min(first + BATCH, size)) for first in range(0, size, BATCH)]
        loader = DataLoader(
            records,
            batch_size=None,
            sampler=batches,
            collate_fn=self,
            num_workers=num_workers,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # the global one must not be drawn from
        )
        for found in begin_loading(loader):
            yield from found

    def tokenize(self, *texts: Any, **how: Any) -> Any:  # noqa: ANN401 - a BatchEncoding
        """Tokenize with special tokens, cut to `max_length` where longer ones are.

        Where longer ones are dropped it raises a DroppedError.
        """
        truncation = how.pop("truncation", True)
        if self.overlong == "cut":
            how |= {"truncation": truncation, "max_length": self.max_length}
        found = self.tokenizer(*texts, **how)
        rows = found[INPUT_IDS]
        if not isinstance(rows[0], list):  # of one text
            rows = [rows]
        if max(map(len, rows)) > self.max_length:
            raise DroppedError(LONGER)
        return found

    def padded(self, found: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        """Pad the rows of a sample to the longest."""
        longest, rows = max(map(len, found[INPUT_IDS])), dict[str, list[list[int]]]()
        fills = {INPUT_IDS: pad_token_of(self.tokenizer), LABELS: IGNORED}
        for name in (INPUT_IDS, ATTENTION_MASK, TYPE_IDS, LABELS):
            if name in found:
                fill = [fills.get(name, 0)]
                rows[name] = [row + fill * (longest - len(row)) for row in found[name]]
        return rows


def text_fields(encoder: RecordEncoder, record: RoleValues, ends: Ends) -> RecordFields:
    """Encode a text whole, without special tokens: it is divided where it is read."""
    text = record["text"]
    if not isinstance(text, str | None):
        raise ValueError(f"the text is of type {type(text).__name__}, not a string")
    if text is None or not text.strip():
        raise DroppedError("without text")
    ids = encoder.tokenizer([text], add_special_tokens=False)[INPUT_IDS][0]
    return {INPUT_IDS: ends.strip(ids)}


def records_of(batch: Mapping[str, Sequence[Any]], *, is_json: bool) -> Iterator[Any]:
    """Give the records of a batch of columns; a ValueError for what is none."""
    for values in zip(*batch.values(), strict=True):
        record: Any = dict(zip(batch, map(_without_none, values), strict=True))
        why_none = record.pop(FAULT_COLUMN, None)
        try:
            if why_none is not None:
                raise ValueError(why_none)
            if is_json:
                record = json_object(record["text"])
            elif isinstance(text := record.get("text"), bytes):
                record["text"] = text.decode()
        except ValueError as error:
            record = error
        yield record


def _without_none(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Leave out of objects what is None: Arrow adds what other objects of the column hold."""
    if isinstance(value, Mapping):
        found = dict[str, Any]()
        for name, each in value.items():
            if each is not None:
                found[name] = _without_none(each)
        return found
    if isinstance(value, list | tuple):
        return [*map(_without_none, value)]
    return value


def number_in(cell: object) -> Any:  # noqa: ANN401 - a number, or the cell
    """Read a cell of CSV as a whole or real number; what is none, such as `007`, stays as it is."""
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell) is None:
        return cell
    if WHOLE.fullmatch(cell):
        return int(cell)
    return float(cell)


def number_of(record: RoleValues, role: str, least: float = -_LARGEST) -> float:
    """Give a number of a record; a ValueError where it is none, as true and infinity are."""
    value = record[role]
    number = number_in(value)
    if type(number) not in {int, float} or not least <= number <= _LARGEST:
        text = "" if least else " of 0 or more"
        raise ValueError(f"its {role} is {value!r}; write a number{text}")
    return float(number)


def text_of(record: RoleValues, role: str) -> str:
    """Give a text of a record; a ValueError where it is none, or blank."""
    text = record[role]
    if not isinstance(text, str):
        raise ValueError(f"its {role} is of type {type(text).__name__}, not a string")
    if not text.strip():
        raise ValueError(f"its {role} is empty")
    return text
