"""Documents as byte-level tokens: what every data set of texts has in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.holdout import HELD_OUT, TRAIN, check_split, held_out_mask
from trainer.data.index import Index
from trainer.errors import ConfigError
from trainer.plan.cut import IntArray

BOS = 256
EOS = 257
VOCAB_SIZE = 258
_CHUNK_TOKENS = 2**22
"""Tokens counted at a time: bounds the memory of a count over a large corpus."""


@final
@dataclass(frozen=True, slots=True)
class ByteEntropies:
    """What counting bytes alone predicts of the held-out text, in nats per predicted token.

    Attributes:
        unigram: knowing nothing of the text so far.
        bigram: knowing the token before.
    """

    unigram: float
    bigram: float


class ByteDocuments(Dataset[dict[str, Tensor]]):
    """Documents of an index, one sample each: `[BOS] + bytes + [EOS]`, cut at `max_length`.

    Tokens are bytes, 0 to 255, then BOS = 256 and EOS = 257: a vocabulary of 258, not padded. A
    document that is too long is truncated (losing its EOS), never split. `labels` are
    `input_ids`; the objective shifts. Subclasses add nothing but where the index comes from.

    Args:
        index: the documents, at least one, shared by both splits.
        split: `train` or `held_out`.
        max_length: most tokens of a sample, BOS and EOS counted; at least 2.
        holdout: share of the index's groups that is held out, at least one.
        seed: selects which.

    Attributes:
        lengths: `(samples,)`, tokens of each sample.

    Raises:
        ConfigError: `split`, `max_length` or `holdout` is out of range.
    """

    vocab_size = VOCAB_SIZE
    start_id = BOS
    stop_id = EOS
    draws_randomness = False

    def __init__(
        self, index: Index, *, split: str, max_length: int, holdout: float, seed: int
    ) -> None:
        check_split(split, holdout)
        if max_length < 2:  # noqa: PLR2004 - one token to see, one to predict
            raise ConfigError(f"data.max_length={max_length}: must be at least 2")
        self.split = split
        self.max_length = max_length
        self._index = index
        self._settings = f"{split}|{max_length}|{holdout!r}|{seed}"
        held_out = held_out_mask(index.groups, holdout, seed)
        self._documents = {TRAIN: np.flatnonzero(~held_out), HELD_OUT: np.flatnonzero(held_out)}
        self._ids: IntArray = self._documents[split]
        self.lengths: IntArray = self._lengths(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give `input_ids` and `labels`, both `(length,)` int64 and the same tensor."""
        document = self._ids[i]
        begin, end = self._index.offsets[document : document + 2]
        tokens = np.empty(self.lengths[i], dtype=np.int64)
        body = self._index.blob[begin : min(end, begin + len(tokens) - 1)]
        tokens[-1] = EOS
        tokens[1 : 1 + len(body)] = body
        tokens[0] = BOS
        input_ids = torch.from_numpy(tokens)
        return {"input_ids": input_ids, "labels": input_ids}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the documents and the settings of this split."""
        return hashlib.sha256(f"{self._index.digest}|{self._settings}".encode()).hexdigest()

    @property
    def num_cut(self) -> int:
        """Tokens of this split beyond `max_length`."""
        offsets = self._index.offsets
        whole = offsets[self._ids + 1] - offsets[self._ids] + 2
        return int(whole.sum() - self.lengths.sum())

    @property
    def num_skipped(self) -> int:
        """Records or files that could not be read and were left out of the index."""
        return int(self._index.notes["num_skipped"])

    @property
    def skipped(self) -> tuple[str, ...]:
        """The first of what was left out, each with the reason."""
        return tuple(self._index.notes["skipped"])

    @staticmethod
    def decode(ids: Iterable[int]) -> str:
        """Turn tokens back into text, without specials; broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < BOS).decode("utf-8", errors="replace")

    def byte_entropies(self) -> ByteEntropies:
        """Measure what byte counts alone would score on the held-out documents.

        Comparable with a model's held-out loss: over the same truncated samples, every token
        but the first of a sample is predicted (bytes and, where it was not cut off, EOS; BOS
        only conditions), and the mean is taken over all predicted tokens of the split:

            unigram = -1/N sum_(a,b) h(a,b) ln p(b),    p(b)   = (c(.,b) + 1) / (c(.,.) + 258)
            bigram  = -1/N sum_(a,b) h(a,b) ln p(b|a),  p(b|a) = (c(a,b) + 1) / (c(a,.) + 258)

        with c and h the counts of token b after token a in the training and in the held-out
        samples, N = h(.,.), and add-one smoothing over the vocabulary. Costs one pass over both
        splits, some 20 ns a token.

        Returns:
            Both in nats per token; NaN where nothing is held out.
        """
        counts = self._pair_counts(TRAIN)
        held_out = self._pair_counts(HELD_OUT)
        total = held_out.sum()
        if total == 0:
            return ByteEntropies(unigram=float("nan"), bigram=float("nan"))
        unigram = _log_smoothed(counts.sum(0))
        bigram = _log_smoothed(counts)
        return ByteEntropies(
            unigram=-float((held_out.sum(0) * unigram).sum() / total),
            bigram=-float((held_out * bigram).sum() / total),
        )

    def _lengths(self, documents: IntArray) -> IntArray:
        offsets = self._index.offsets
        whole: IntArray = offsets[documents + 1] - offsets[documents] + 2
        return np.minimum(whole, self.max_length)

    def _tokens(self, documents: IntArray, lengths: IntArray) -> IntArray:
        """Lay the documents' tokens end to end; `(sum of lengths,)` int64."""
        index = self._index
        ends = np.cumsum(lengths)
        begins = ends - lengths
        sources = np.repeat(index.offsets[documents] - begins - 1, lengths)
        sources += np.arange(len(sources))
        # BOS and EOS lie one byte outside their document, perhaps outside the blob.
        np.clip(sources, 0, max(len(index.blob) - 1, 0), out=sources)
        tokens: IntArray = index.blob[sources].astype(np.int64)
        tokens[begins] = BOS
        is_whole = index.offsets[documents + 1] - index.offsets[documents] + 2 <= lengths
        tokens[ends[is_whole] - 1] = EOS
        return tokens

    def _pair_counts(self, split: str) -> npt.NDArray[np.int64]:
        """Count every token after every other; `(258, 258)`, the earlier one first."""
        counts = np.zeros(VOCAB_SIZE * VOCAB_SIZE, dtype=np.int64)
        for documents in self._chunks(split):
            tokens = self._tokens(documents, self._lengths(documents))
            # A BOS is never predicted: it only follows the document before.
            follows = tokens[1:] != BOS
            pairs = tokens[:-1][follows] * VOCAB_SIZE + tokens[1:][follows]
            counts += np.bincount(pairs, minlength=len(counts))
        return counts.reshape(VOCAB_SIZE, VOCAB_SIZE)

    def _chunks(self, split: str) -> Iterator[IntArray]:
        documents = self._documents[split]
        chunks = np.cumsum(self._lengths(documents)) // _CHUNK_TOKENS
        yield from np.split(documents, np.flatnonzero(np.diff(chunks)) + 1)


def _log_smoothed(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Take the log of add-one smoothed shares along the last axis."""
    smoothed = counts + 1.0
    shares: npt.NDArray[np.float64] = np.log(smoothed / smoothed.sum(-1, keepdims=True))
    return shares
