"""Lay documents out as token ids in an index, and give them as samples."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.components import Overlong
from trainer.core.errors import DataError
from trainer.core.rows import Row, RunFacts
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.index import Index
from trainer.data.samples import INPUT_IDS, DataFacts, DataRecord
from trainer.data.split import HELD_OUT, TRAIN, held_out_mask
from trainer.plan.cut import IntArray

BOS = 256
EOS = 257
VOCAB_SIZE = 258

_BLOCK_TOKENS = 2**22
"""Tokens counted at a time: bounds the memory of a count over a large corpus."""

STORED, REAL = np.dtype("<i4"), np.dtype("<f4")
"""What ids, and real numbers, are stored in."""
WEIGHTED_HEAD = 3  # numbers before the ids of a text with a weight: the counts of both, and it


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
        if end and tuple(ids[-end:]) == self.suffix:
            ids = ids[:-end]
        return ids


SampleKind = str | int
"""What a field is: `ids`, a `number`, a `real` one or several `reals`, or how many rows it has."""


@final
class TextSamples:
    """Samples of texts, each of which is stored as its ids alone.

    The index holds `head` numbers before the ids of each, of which the third is its weight.
    `documents`, `(samples,)`, is the document of each sample, and `lengths` its tokens. `num_cut`,
    `(documents,)`, counts tokens that are in no sample. For `overlong` see `ByteDocuments`.
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
        inside, context = 0, 1
        if ends.of_samples:
            inside, context = len(ends), 0
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
        body = self._index.entry(document, self._stored)[self._head :]
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
        return np.concatenate([*map(np.asarray, parts)]).astype(np.int64)

    def read(self, sample: int) -> dict[str, Tensor]:
        """Give `input_ids`, int64, as `labels` too, and their `weight`; all `(length,)`."""
        input_ids = torch.from_numpy(self.ids(sample))
        fields = {INPUT_IDS: input_ids, LABELS: input_ids}
        if self._head == WEIGHTED_HEAD:
            weight = self._index.entry(int(self.documents[sample]), REAL)[WEIGHTED_HEAD - 1]
            fields[WEIGHT] = torch.full(input_ids.shape, float(weight))
        return fields


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
        numbers = self._index.entry(sample, STORED)
        place, found = len(self._kinds), {}
        for count, (name, kind) in zip(numbers, self._kinds.items(), strict=False):
            values = numbers[place : place + count]
            place += int(count)
            found[name] = torch.from_numpy(values.astype(np.int64))
            if kind in {"real", "reals"}:
                found[name] = torch.from_numpy(values.view(REAL).copy())
            if kind in {"real", "number"}:
                found[name] = found[name][0]
            elif isinstance(kind, int):
                found[name] = found[name].view(kind, -1)
        return found


def kinds_of(fields: Mapping[str, Any]) -> dict[str, SampleKind]:
    """Tell the kinds of the fields of a sample."""
    kinds: dict[str, SampleKind] = {}
    for name, values in fields.items():
        array = np.asarray(values)
        if array.ndim > 1:
            kinds[name] = len(array)
        elif array.ndim == 1:
            # An empty list has the dtype of real numbers.
            kinds[name] = "reals" if array.dtype.kind == "f" and array.size else "ids"
        elif array.dtype.kind == "f":
            kinds[name] = "real"
        else:
            kinds[name] = "number"
    return kinds


def packed_fields(fields: Mapping[str, Any]) -> bytes:
    """Put the fields of one sample into bytes: how many numbers each has, then the numbers."""
    arrays = [*map(np.ravel, fields.values())]
    heads = np.array([*map(len, arrays)], dtype=STORED)
    parts = [heads.tobytes()]
    for each in arrays:
        dtype = REAL if each.dtype.kind == "f" else STORED
        parts.append(each.astype(dtype).tobytes())
    return b"".join(parts)


@final
@dataclass(frozen=True, slots=True)
class ByteEntropies:
    """What counting bytes alone predicts of the held-out text, in nats per predicted token."""

    unigram: float  # knowing nothing of the text so far
    bigram: float  # knowing the token before


def samples_of(documents: IntArray, index: Index) -> Iterator[range]:
    """Give the samples of each document of an index; `documents`, `(samples,)`, is that of each."""
    bounds = np.searchsorted(documents, np.arange(len(index.groups) + 1)).tolist()
    yield from map(range, bounds, bounds[1:])


class TwoSides(Dataset[dict[str, Tensor]]):
    """Samples of an index of which some are held out; both sides share all but which are theirs."""

    _index: Index
    _samples: TextSamples | FieldSamples  # of both sides
    _split: str  # which side this is
    _settings: str  # what the samples depend on beside the index and the side
    _split_rule: str
    _holdout: float | None  # None where the documents bring their own parts

    def _hold_out(self, documents: npt.NDArray[np.bool_]) -> None:
        """Draw the sides: the documents that are held out, `(documents,)`, and the others."""
        self._sides = {TRAIN: ~documents, HELD_OUT: documents}
        of_samples = self._samples.documents
        # By side, the index of each sample among those of both
        self._ids = {name: np.flatnonzero(side[of_samples]) for name, side in self._sides.items()}

    def splits(self) -> dict[str, Self]:
        """Give both sides."""
        sides = {TRAIN: copy.copy(self), HELD_OUT: copy.copy(self)}
        for name, side in sides.items():
            side._split = name
        return sides

    @property
    def original_ids(self) -> IntArray:
        """Index of each sample among those of both sides, `(samples,)`."""
        return self._ids[self._split]

    def facts(self) -> DataFacts:
        """Say what both kinds of samples are known by."""
        return DataFacts(
            lengths=self._samples.lengths[self.original_ids],
            draws_randomness=False,
            fingerprint=self._fingerprint,
            num_skipped=self._index.num_skipped,
            skipped=self._index.skipped,
            num_cut=int(self._samples.num_cut[self._sides[self._split]].sum()),
            decode=self.decode,
            predicted_records=self.predicted_records,
            prompt=self.prompt,
            describe_records=self.describe,
            split_rule=self._split_rule,
            holdout=self._holdout,
            original_ids=self.original_ids,
            contents=lambda: self._index.groups[self._samples.documents[self.original_ids]],
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Write tokens as text."""
        raise NotImplementedError

    def prompt(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Give the tokens that a document of this text begins with, and those that end one."""
        raise NotImplementedError

    def describe(self, _: RunFacts) -> Sequence[Row]:
        """Say what the records are, and how many of them are no samples."""
        return ()

    def predicted_records(self) -> Iterator[DataRecord]:
        """Give the documents, where none is held out."""
        for document, samples in enumerate(samples_of(self._samples.documents, self._index)):
            yield DataRecord(number=document, samples=samples)

    def __len__(self) -> int:
        return len(self.original_ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give the fields of a sample; of a text `input_ids` and `labels`, `(length,)` int64."""
        return self._samples.read(int(self.original_ids[i]))

    def _fingerprint(self) -> str:
        """SHA-256 over the contents of the index and the settings of this side."""
        text = f"{self._index.digest}|{self._split}|{self._settings}"
        return hashlib.sha256(text.encode()).hexdigest()


class ByteDocuments(TwoSides):
    """Documents of an index: `[BOS] + bytes + [EOS]`, in samples of at most `max_length` tokens.

    Tokens are bytes, 0 to 255, then BOS = 256 and EOS = 257: a vocabulary of 258, not padded.
    `labels` are `input_ids`; the objective shifts. Documents, not samples, are held out, so that no
    chunk of a held-out document is trained on. Subclasses add nothing but where the index comes
    from. An index holds one document at least. Its groups, not samples, are held out, at least one.
    A longer document becomes several samples (`chunk`), each of which begins with the last token of
    the one before as context, so that every token but the document's first is predicted once; one,
    without the rest (`cut`); or none (`drop`).
    """

    _samples: TextSamples
    _split_rule = "whole documents, copies of one together, drawn by data.split_seed"

    def __init__(
        self,
        index: Index,
        split: str,
        max_length: int,
        holdout: float,
        seed: int,
        overlong: Overlong,
    ) -> None:
        self._index, self._split = index, split
        self._holdout = holdout
        # Other samples than those of a word, under the same settings, need another word.
        word = {"cut": "", "chunk": "|chunk with context", "drop": "|drop"}[overlong]
        self._settings = f"{max_length}|{holdout!r}|{seed}{word}"
        ends = Ends((BOS,), (EOS,), of_samples=False)
        byte = np.dtype(np.uint8)
        self._samples = TextSamples(index, ends, max_length, overlong, stored=byte, head=0)
        self._hold_out(held_out_mask(index.groups, holdout, seed))
        if split == TRAIN and not len(self):
            raise DataError(
                f"data.overlong={overlong}: every document is longer than data.max_length="
                f"{max_length} tokens; set a larger one, or data.overlong=chunk"
            )

    def facts(self) -> DataFacts:
        """Add what is known of texts as bytes."""
        known = super().facts()
        return replace(known, vocab_size=VOCAB_SIZE, byte_entropies=self.byte_entropies)

    @classmethod
    def text_facts(cls) -> DataFacts:
        """Say how a text becomes tokens, and tokens a text, where no document is read."""
        return DataFacts(vocab_size=VOCAB_SIZE, decode=cls.decode, prompt=cls.prompt)

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        """See the base class; BOS and EOS are words."""
        words = {BOS: b"<|bos|>", EOS: b"<|eos|>"}
        return b"".join(words.get(i) or bytes([i]) for i in ids).decode(errors="replace")

    @staticmethod
    def prompt(text: str) -> tuple[Sequence[int], Sequence[int]]:
        """See the base class."""
        return [BOS, *text.encode()], [EOS]

    def byte_entropies(self, places: IntArray) -> ByteEntropies:
        """Measure what byte counts alone would score on held-out samples; NaN without any.

        Comparable with a model's held-out loss: over the same samples, those at `places` of the
        held-out part, every token but the first of a sample is predicted (bytes and EOS; BOS only
        conditions), and the mean is taken over all predicted tokens:

            unigram = -1/N sum_(a,b) h(a,b) ln p(b),    p(b)   = (c(.,b) + 1) / (c(.,.) + 258)
            bigram  = -1/N sum_(a,b) h(a,b) ln p(b|a),  p(b|a) = (c(a,b) + 1) / (c(a,.) + 258)

        with c and h the counts of token b after token a in the training and in the held-out
        samples, N = h(.,.), and add-one smoothing over the vocabulary. Costs one pass over both
        splits, some 30 ns a token.
        """
        counts = self._pair_counts(self._ids[TRAIN])
        held_out = self._pair_counts(self._ids[HELD_OUT][places])
        total = held_out.sum()
        if total == 0:
            return ByteEntropies(unigram=float("nan"), bigram=float("nan"))
        # 258 x 258 floats, 0.5 MB
        smoothed = counts + 1.0
        after_any = counts.sum(0) + 1.0
        bigram = held_out * np.log(smoothed / smoothed.sum(-1, keepdims=True))
        unigram = held_out.sum(0) * np.log(after_any / after_any.sum())
        return ByteEntropies(-float(unigram.sum() / total), -float(bigram.sum() / total))

    def _pair_counts(self, ids: IntArray) -> IntArray:
        """Count every token after every other; `(258, 258)`, the earlier one first."""
        counts = np.zeros(VOCAB_SIZE * VOCAB_SIZE, dtype=np.int64)
        lengths = self._samples.lengths
        blocks = np.cumsum(lengths[ids]) // _BLOCK_TOKENS
        for block in np.split(ids, np.flatnonzero(np.diff(blocks)) + 1):
            # `np.split` makes one empty block of no samples.
            if len(block) == 0:
                break
            tokens = np.concatenate([*map(self._samples.ids, block)])
            pairs = tokens[:-1] * VOCAB_SIZE + tokens[1:]
            # The first token of a sample is not predicted from the last one of another.
            pairs = np.delete(pairs, np.cumsum(lengths[block])[:-1] - 1)
            counts += np.bincount(pairs, minlength=len(counts))
        return counts.reshape(VOCAB_SIZE, VOCAB_SIZE)
