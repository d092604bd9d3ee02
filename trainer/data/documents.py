"""Serve documents as byte-level tokens: what every data set of texts has in common."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.components import Overlong
from trainer.core.errors import DataError
from trainer.data.index import Index
from trainer.data.samples import HELD_OUT, TRAIN, KeyArray, held_out_mask
from trainer.data.token_samples import Ends, FieldSamples, TextSamples
from trainer.plan.cut import IntArray

BOS = 256
EOS = 257
VOCAB_SIZE = 258

_BLOCK_TOKENS = 2**22
"""Tokens counted at a time: bounds the memory of a count over a large corpus."""


@final
@dataclass(frozen=True, slots=True)
class ByteEntropies:
    """What counting bytes alone predicts of the held-out text, in nats per predicted token."""

    unigram: float  # knowing nothing of the text so far
    bigram: float  # knowing the token before


class TwoSides(Dataset[dict[str, Tensor]]):
    """Samples of an index of which some are held out; both sides share all but which are theirs."""

    _index: Index
    _samples: TextSamples | FieldSamples  # of both sides
    _split: str  # which side this is
    _settings: str  # what the samples depend on beside the index and the side

    def _hold_out(self, documents: npt.NDArray[np.bool_]) -> None:
        """Draw the sides: the documents that are held out, `(documents,)`, and the others."""
        sides = {TRAIN: ~documents, HELD_OUT: documents}
        of_samples = self._samples.documents
        # By side, the index of each sample among those of both
        self._ids = {name: np.flatnonzero(side[of_samples]) for name, side in sides.items()}
        self._num_cut = {
            name: int(self._samples.num_cut[side].sum()) for name, side in sides.items()
        }

    def splits(self) -> dict[str, Self]:
        """Give both sides."""
        sides = {TRAIN: copy.copy(self), HELD_OUT: copy.copy(self)}
        for name, side in sides.items():
            side._split = name
            for cached in ("lengths", "fingerprint"):
                vars(side).pop(cached, None)
        return sides

    @property
    def original_ids(self) -> IntArray:
        """Index of each sample among those of both sides, `(samples,)`."""
        return self._ids[self._split]

    @property
    def contents(self) -> KeyArray:
        """A number for each sample, `(samples,)`, which those of equal documents share."""
        return self._index.groups[self._samples.documents[self.original_ids]]

    @cached_property
    def lengths(self) -> IntArray:
        """Tokens of each sample, `(samples,)`."""
        return self._samples.lengths[self.original_ids]

    @property
    def num_cut(self) -> int:
        """Tokens of this side's documents that are in no sample."""
        return self._num_cut[self._split]

    def __len__(self) -> int:
        return len(self.original_ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give the fields of a sample; of a text `input_ids` and `labels`, `(length,)` int64."""
        return self._samples.read(int(self.original_ids[i]))

    @cached_property
    def fingerprint(self) -> str:
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
    vocab_size = VOCAB_SIZE
    draws_randomness = False
    split_rule = "whole documents, copies of one together, drawn by data.split_seed"

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
        self.num_skipped, self.skipped = index.num_skipped, index.skipped
        self.holdout = holdout
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

    def decode(self, ids: Sequence[int]) -> str:
        """Write tokens as text, with words for BOS and EOS."""
        words = {BOS: b"<|bos|>", EOS: b"<|eos|>"}
        return b"".join(words.get(i) or bytes([i]) for i in ids).decode(errors="replace")

    def prompt(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Give the tokens that a document of this text begins with, and those that end one."""
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
        counts, held_out = (
            self._pair_counts(ids) for ids in (self._ids[TRAIN], self._ids[HELD_OUT][places])
        )
        total = held_out.sum()
        if total == 0:
            return ByteEntropies(unigram=float("nan"), bigram=float("nan"))
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
        for block in np.split(ids, np.flatnonzero(np.diff(blocks)) + 1) if len(ids) else ():
            tokens = np.concatenate([self._samples.ids(sample) for sample in block])
            pairs = tokens[:-1] * VOCAB_SIZE + tokens[1:]
            # The first token of a sample is not predicted from the last one of another.
            pairs = np.delete(pairs, np.cumsum(lengths[block])[:-1] - 1)
            counts += np.bincount(pairs, minlength=len(counts))
        return counts.reshape(VOCAB_SIZE, VOCAB_SIZE)
