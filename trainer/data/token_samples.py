"""Lay token ids out in an index, and give them as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.config.components import Overlong
from trainer.data.collate import LABELS
from trainer.data.documents import divide
from trainer.data.index import Index
from trainer.data.samples import INPUT_IDS
from trainer.plan.cut import IntArray

STORED, REAL = np.dtype("<i4"), np.dtype("<f4")
"""What ids, and real numbers, are stored in."""


class TokenSamples(Protocol):
    """Samples in an index of ids."""

    documents: IntArray  # `(samples,)`, the document of each
    lengths: IntArray  # `(samples,)`, tokens of each
    settings: str  # what they depend on beside the index

    def read(self, sample: int) -> dict[str, Tensor]:
        """Give its fields."""

    def num_tokens(self, documents: IntArray) -> int:
        """Count the tokens of some documents, those that are in no sample included."""

    def num_repeated(self, samples: IntArray) -> int:
        """Count the tokens of some samples that others have, too."""


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


Kind = Literal["ids", "number", "real", "rows"]
"""What a field of a sample is: numbers, one of them, a real one, or rows of equal lengths."""


@final
class TextSamples:
    """Samples of texts, each of which is stored as its ids alone.

    Args:
        index: the texts.
        ends: special tokens around them.
        max_length: most tokens of a sample.
        overlong: what becomes of longer texts; see `ByteDocuments`.
    """

    def __init__(self, index: Index, ends: Ends, max_length: int, overlong: Overlong) -> None:
        self._index, self._ends = index, ends
        self.settings = f"{ends}|{max_length}|{overlong}"
        sizes = np.diff(index.offsets) // STORED.itemsize
        self._whole = sizes + len(ends)
        inside, context = (0, 1) if not ends.of_samples else (len(ends), 0)
        self.documents, self._begins, lengths = divide(
            self._whole - inside, max_length - inside, overlong, context
        )
        self._body, self.lengths = lengths, lengths + inside
        self._context = context

    def num_tokens(self, documents: IntArray) -> int:
        """Count the tokens of some documents, those that are in no sample included."""
        return int(self._whole[documents].sum())

    def num_repeated(self, samples: IntArray) -> int:
        """Count the tokens of some samples that others have, too."""
        repeated = self._context or len(self._ends)
        return repeated * int(np.count_nonzero(self._begins[samples]))

    def read(self, sample: int) -> dict[str, Tensor]:
        """Give `input_ids` and `labels`, both `(length,)` int64 and the same tensor."""
        document, begin = int(self.documents[sample]), int(self._begins[sample])
        first, last = map(int, self._index.offsets[document : document + 2])
        body, end = self._index.blob[first:last].view(STORED), begin + int(self._body[sample])
        prefix, suffix = self._ends.prefix, self._ends.suffix
        if self._ends.of_samples:
            parts: list[npt.ArrayLike] = [prefix, body[begin:end], suffix]
        else:
            of_body, of_suffix = len(prefix), len(prefix) + len(body)
            parts = [
                prefix[begin:end],
                body[max(begin - of_body, 0) : max(end - of_body, 0)],
                suffix[max(begin - of_suffix, 0) : max(end - of_suffix, 0)],
            ]
        numbers = np.concatenate([np.asarray(each) for each in parts])
        input_ids = torch.from_numpy(numbers.astype(np.int64))
        return {INPUT_IDS: input_ids, LABELS: input_ids}


@final
class FieldSamples:
    """Samples of several fields, each of which is a record.

    Args:
        index: what `packed_fields` gave for each.
        fields: kinds of the fields by name, in their order.
        num_rows: rows of those that have some.
    """

    def __init__(self, index: Index, fields: Mapping[str, Kind], num_rows: int = 1) -> None:
        self._index, self._fields, self._num_rows = index, fields, num_rows
        self.settings = f"{fields}|{num_rows}"
        self.documents = np.arange(len(index.groups))
        heads = index.offsets[:-1] // STORED.itemsize + [*fields].index(INPUT_IDS)
        self.lengths = index.blob.view(STORED)[heads].astype(np.int64)

    def num_tokens(self, documents: IntArray) -> int:
        """Count the tokens of some documents."""
        return int(self.lengths[documents].sum())

    def num_repeated(self, samples: IntArray) -> int:
        """Give 0: no sample has tokens of another."""
        return 0

    def read(self, sample: int) -> dict[str, Tensor]:
        """Give its fields, int64 but for real numbers."""
        first, last = map(int, self._index.offsets[sample : sample + 2])
        numbers = self._index.blob[first:last].view(STORED)
        place, found = len(self._fields), {}
        for count, (name, kind) in zip(numbers, self._fields.items(), strict=False):
            values = numbers[place : place + count]
            place += int(count)
            found[name] = self._tensor(values, kind)
        return found

    def _tensor(self, values: npt.NDArray[np.int32], kind: Kind) -> Tensor:
        if kind == "real":
            return torch.tensor(float(values.view(REAL)[0]))
        tensor = torch.from_numpy(values.astype(np.int64))
        if kind == "number":
            return tensor[0]
        return tensor if kind == "ids" else tensor.view(self._num_rows, -1)


def packed_fields(fields: Sequence[npt.ArrayLike]) -> bytes:
    """Put the fields of one sample into bytes: how many numbers each has, then the numbers."""
    arrays = [np.asarray(each).ravel() for each in fields]
    heads = np.array([len(each) for each in arrays], dtype=STORED)
    stored = [a.astype(REAL) if a.dtype.kind == "f" else a.astype(STORED) for a in arrays]
    return b"".join([heads.tobytes(), *(each.tobytes() for each in stored)])
