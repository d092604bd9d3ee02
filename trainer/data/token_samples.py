"""Lay token ids out in an index, and give them as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.config.components import Overlong
from trainer.data.collate import LABELS
from trainer.data.index import Index
from trainer.data.samples import INPUT_IDS
from trainer.plan.cut import IntArray

STORED, REAL = np.dtype("<i4"), np.dtype("<f4")
"""What ids, and real numbers, are stored in."""


@final
@dataclass(frozen=True)
class Ends:
    """Special tokens around a text."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    # Around every sample, as masked models have it; else around every document, whose samples
    # begin with the last token of the one before.
    of_samples: bool

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def strip(self, ids: Sequence[int]) -> Sequence[int]:
        """Take off what a text brings itself, so that it is there once."""
        begin, end = len(self.prefix), len(self.suffix)
        if begin and tuple(ids[:begin]) == self.prefix:
            ids = ids[begin:]
        return ids[:-end] if end and tuple(ids[-end:]) == self.suffix else ids


SampleKind = str | int
"""What a field of a sample is: `ids`, a `number`, a `real` one, or how many rows it has."""


@final
class TextSamples:
    """Samples of texts, each of which is stored as its ids alone.

    The index holds `head` numbers before the ids of each. `documents`, `(samples,)`, is the
    document of each sample, and `lengths` its tokens. `num_cut`, `(documents,)`, counts tokens that
    are in no sample. For `overlong` see `ByteDocuments`.
    """

    def __init__(
        self,
        index: Index,
        ends: Ends,
        max_length: int,
        overlong: Overlong,
        *,
        stored: np.dtype[Any] = STORED,
        head: int = 1,
    ) -> None:
        self._index, self._ends, self._stored, self._head = index, ends, stored, head
        self.settings = f"{ends}|{max_length}|{overlong}"
        whole = np.diff(index.offsets) // stored.itemsize - head + len(ends)
        inside, context = (len(ends), 0) if ends.of_samples else (0, 1)
        self.documents, self._begins, lengths = divide(
            whole - inside, max_length - inside, overlong, context
        )
        self.lengths = lengths + inside
        cut: Mapping[Overlong, IntArray | int]
        cut = {"chunk": 0, "cut": whole - max_length, "drop": whole}
        self.num_cut = np.where(whole > max_length, cut[overlong], 0)

    def ids(self, sample: int) -> IntArray:
        """Give the tokens of a sample, `(length,)`."""
        document, begin = int(self.documents[sample]), int(self._begins[sample])
        first, last = map(int, self._index.offsets[document : document + 2])
        body = self._index.blob[first:last].view(self._stored)[self._head :]
        prefix, suffix = self._ends.prefix, self._ends.suffix
        end = begin + int(self.lengths[sample])
        if self._ends.of_samples:
            parts: list[npt.ArrayLike] = [prefix, body[begin : end - len(self._ends)], suffix]
        else:
            of_body, of_suffix = len(prefix), len(prefix) + len(body)
            parts = [
                prefix[begin:end],
                body[max(begin - of_body, 0) : max(end - of_body, 0)],
                suffix[max(begin - of_suffix, 0) : max(end - of_suffix, 0)],
            ]
        return np.concatenate([np.asarray(each) for each in parts]).astype(np.int64)

    def read(self, sample: int) -> dict[str, Tensor]:
        """Give `input_ids` and `labels`, both `(length,)` int64 and the same tensor."""
        input_ids = torch.from_numpy(self.ids(sample))
        return {INPUT_IDS: input_ids, LABELS: input_ids}


def divide(
    whole: IntArray, max_length: int, overlong: Overlong, context: int = 1
) -> tuple[IntArray, IntArray, IntArray]:
    """Divide documents into samples.

    `whole` are the tokens of each document, `(documents,)`; a later sample has so many tokens of
    `context` from the end of the one before. Gives of each sample its document, first token there,
    and length, `(samples,)` each.
    """
    counts, stride = np.ones_like(whole), max_length - context
    if overlong == "chunk":
        counts = np.maximum(-(-(whole - context) // stride), 1)
    elif overlong == "drop":
        counts = (whole <= max_length).astype(np.int64)
    documents = np.repeat(np.arange(len(whole)), counts)
    numbers = np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]
    begins = numbers * stride
    return documents, begins, np.minimum(whole[documents] - begins, max_length)


@final
class FieldSamples:
    """Samples of several fields, each of which is a record; see `TextSamples` for the attributes.

    The index holds what `packed_fields` gave for each; `kinds` are of the fields, in their order.
    """

    def __init__(self, index: Index, kinds: Mapping[str, SampleKind]) -> None:
        self._index, self._kinds, self.settings = index, kinds, str(kinds)
        self.documents = np.arange(len(index.groups))
        heads = index.offsets[:-1] // STORED.itemsize + [*kinds].index(INPUT_IDS)
        self.lengths = index.blob.view(STORED)[heads].astype(np.int64)
        self.num_cut = np.zeros(len(index.groups), dtype=np.int64)

    def read(self, sample: int) -> dict[str, Tensor]:
        """Give its fields, int64 but for real numbers."""
        first, last = map(int, self._index.offsets[sample : sample + 2])
        numbers = self._index.blob[first:last].view(STORED)
        place, found = len(self._kinds), {}
        for count, (name, kind) in zip(numbers, self._kinds.items(), strict=False):
            found[name] = _tensor(numbers[place : place + count], kind)
            place += int(count)
        return found


def _tensor(values: npt.NDArray[np.int32], kind: SampleKind) -> Tensor:
    if kind == "real":
        return torch.tensor(float(values.view(REAL)[0]))
    tensor = torch.from_numpy(values.astype(np.int64))
    if isinstance(kind, int):
        return tensor.view(kind, -1)
    return tensor if kind == "ids" else tensor[0]


def kinds_of(fields: Mapping[str, Any]) -> dict[str, SampleKind]:
    """Tell the kinds of the fields of a sample."""
    kinds: dict[str, SampleKind] = {}
    for name, values in fields.items():
        array = np.asarray(values)
        if array.ndim > 1:
            kinds[name] = len(array)
        elif array.ndim == 1:
            kinds[name] = "ids"
        else:
            kinds[name] = "real" if array.dtype.kind == "f" else "number"
    return kinds


def packed_fields(fields: Mapping[str, Any]) -> bytes:
    """Put the fields of one sample into bytes: how many numbers each has, then the numbers."""
    arrays = [np.asarray(values).ravel() for values in fields.values()]
    heads = np.array([len(each) for each in arrays], dtype=STORED)
    stored = [each.astype(REAL if each.dtype.kind == "f" else STORED) for each in arrays]
    return b"".join([heads.tobytes(), *(each.tobytes() for each in stored)])
