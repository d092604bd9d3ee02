"""Encode records by a tokenizer, in as many processes as pay."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from trainer.config.components import Overlong
from trainer.core import signals
from trainer.data.formats import Format
from trainer.data.samples import INPUT_IDS
from trainer.data.token_samples import STORED, Ends, Kind

MANY_RECORDS = 10_000
"""From here on processes are started for the work, which costs half a second."""
BATCH = 100
"""Records at a time: bounds the memory where a record is a book."""

Record = Mapping[str, Any]  # values by role
Encoded = bytes | ValueError
"""What an index keeps of a record, or why it does not."""


LONGER = "longer than data.max_length"
"""Why records are dropped that are too long."""


class DroppedError(ValueError):
    """A record that is sound, and is no sample; says why."""


@final
class BadRecordError(Exception):
    """A record that is bad where one ends the run: its place among the records, and why."""


@final
@dataclass(frozen=True)
class Encoder:
    """Encodes batches of records.

    Args:
        format: of the records.
        encode: gives for each of some records what is kept of it.
        is_json: whether a record is a string of JSON in a column `text`.
        skips: whether a bad record is passed over.
    """

    format: Format
    encode: RecordEncoder
    is_json: bool
    skips: bool

    def __call__(self, batch: Mapping[str, Sequence[Any]], places: Sequence[int]) -> dict[str, Any]:
        """Give of each record what is kept; else why not, and whether it is bad.

        Raises:
            BadRecordError: a record is bad, and is not to be skipped.
        """
        signals.check()
        taken = [self._taken(record) for record in records_of(batch, is_json=self.is_json)]
        with _quiet():
            found = iter(self.encode([each for each in taken if not isinstance(each, ValueError)]))
        results = [each if isinstance(each, ValueError) else next(found) for each in taken]
        for place, each in zip(places, results, strict=True):
            if not (self.skips or isinstance(each, bytes | DroppedError)):
                raise BadRecordError(place, str(each))
        return {
            "entry": [each if isinstance(each, bytes) else b"" for each in results],
            "group": [self._group(each) for each in results],
            "fault": [None if isinstance(each, bytes) else str(each) for each in results],
            "is_dropped": [isinstance(each, DroppedError) for each in results],
        }

    def _group(self, entry: Encoded) -> bytes:
        """Give what copies of a record share: its ids, whatever its labels are."""
        if not isinstance(entry, bytes) or not self.encode.fields:
            return (
                hashlib.blake2b(entry, digest_size=16).digest() if isinstance(entry, bytes) else b""
            )
        numbers, names = np.frombuffer(entry, STORED), [*self.encode.fields]
        place = names.index(INPUT_IDS)
        begin = len(names) + int(numbers[:place].sum())
        ids = numbers[begin : begin + numbers[place]]
        return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()

    def _taken(self, record: Mapping[str, Any] | ValueError) -> Record | ValueError:
        if isinstance(record, ValueError):
            return record
        try:
            return self.format.take(record)
        except ValueError as error:
            return error

    def run(self, records: Any, label: str, file: Path) -> Any:  # noqa: ANN401 - a Dataset of ours
        """Encode a data set into a file of its own.

        Args:
            records: a `datasets.Dataset`.
            label: what is done, for a progress bar.
            file: to write, not beside the data.

        Raises:
            BadRecordError: a record is bad, and is not to be skipped.
        """
        import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds, for this option

        columns = {
            "entry": "large_binary",
            "group": "binary",
            "fault": "string",
            "is_dropped": "bool",
        }
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return records.map(
            self,
            batched=True,
            with_indices=True,
            batch_size=BATCH,
            writer_batch_size=BATCH,
            remove_columns=records.column_names,
            features=datasets.Features({n: datasets.Value(kind) for n, kind in columns.items()}),
            num_proc=num_cores if len(records) >= MANY_RECORDS and num_cores > 1 else None,
            cache_file_name=str(file),
            load_from_cache_file=False,
            new_fingerprint=file.stem,
            desc=label,
        )


def records_of(
    batch: Mapping[str, Sequence[Any]], *, is_json: bool
) -> Iterator[Mapping[str, Any] | ValueError]:
    """Give the records of a batch of columns; what is none says why."""
    if not is_json:
        yield from (
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        )
        return
    for line in batch["text"]:
        try:
            record = json.loads(line) if line.strip() else DroppedError("blank")
        except (ValueError, RecursionError) as error:
            record = ValueError(f"not JSON ({error})")
        is_record = isinstance(record, dict | ValueError)
        kind = type(record).__name__
        yield record if is_record else ValueError(f"not a JSON object but of type {kind}")


def show_progress() -> None:
    """Have `datasets` draw its bars on a terminal, and nowhere else."""
    import datasets  # noqa: PLC0415

    is_shown = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
    (datasets.enable_progress_bars if is_shown else datasets.disable_progress_bars)()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tokenizer: that a text is longer than a model takes is dealt with here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass(frozen=True, kw_only=True)
class RecordEncoder(ABC):
    """Turns a record into the bytes of a sample."""

    tokenizer: Any
    max_length: int  # most tokens of a sample
    overlong: Overlong  # what becomes of longer ones

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Kind]:
        """The fields of a sample, by name, in their order; none where they are ids alone."""

    @abstractmethod
    def encode(self, record: Record) -> bytes:
        """Give the bytes of a sample.

        Raises:
            ValueError: the record is bad, or dropped.
        """

    def __call__(self, records: Sequence[Record]) -> list[Encoded]:
        """Give for each record its bytes, or why it has none."""
        return [self._encoded(record) for record in records]

    def _encoded(self, record: Record) -> Encoded:
        try:
            return self.encode(record)
        except ValueError as error:
            return error


@final
@dataclass(frozen=True, kw_only=True)
class TextEncoder(RecordEncoder):
    """Encodes texts whole, without special tokens: they are divided where they are read."""

    ends: Ends

    @property
    def fields(self) -> Mapping[str, Kind]:
        """None: what is kept are ids alone."""
        return {}

    def __call__(self, records: Sequence[Record]) -> list[Encoded]:
        """Give the ids of each, all tokenised at once."""
        texts = [record["text"] for record in records]
        sound = [text for text in texts if isinstance(text, str) and text.strip()]
        found = self.tokenizer(sound, add_special_tokens=False)["input_ids"] if sound else ()
        ids = dict(zip(sound, found, strict=True))
        return [self._encoded({"ids": ids.get(text), "text": text}) for text in texts]

    def encode(self, record: Record) -> bytes:
        """Give the ids of a text."""
        text = record["text"]
        if text is None or (isinstance(text, str) and not text.strip()):
            raise DroppedError("without text")
        if not isinstance(text, str):
            raise ValueError(f"the text is of type {type(text).__name__}, not a string")
        return np.array(self.ends.strip(record["ids"]), dtype=STORED).tobytes()


def text_of(record: Record, role: str) -> str:
    """Give a text of a record.

    Raises:
        ValueError: it is none, or blank.
    """
    text = record[role]
    if not isinstance(text, str):
        raise ValueError(f"its {role} is of type {type(text).__name__}, not a string")
    if not text.strip():
        raise ValueError(f"its {role} is empty")
    return text


def ends_of(tokenizer: Any, *, is_causal: bool) -> Ends:  # noqa: ANN401 - a tokenizer
    """Find the special tokens that a tokenizer puts around a text.

    Around a document that a causal model learns there is an end in any case.
    """
    plain, whole = (
        [*tokenizer(["a"], add_special_tokens=adds)["input_ids"][0]] for adds in (False, True)
    )
    places = range(len(whole) - len(plain) + 1)
    at = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
    prefix, suffix = whole[:at], whole[at + len(plain) :]
    eos = getattr(tokenizer, "eos_token_id", None)
    if is_causal and eos is not None and eos not in suffix:
        suffix = [*suffix, eos]
    return Ends(tuple(prefix), tuple(suffix), of_samples=not is_causal)


def pad_token_of(tokenizer: Any) -> int:  # noqa: ANN401 - whatever the tokenizer is
    """Find what to pad with, as the field does: the tokenizer's own, else its end, else 0."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((each for each in ids if each is not None), 0)
