"""Write text: append the likeliest token to rows of tokens, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Self, final

import torch
from torch import Tensor

from trainer.data.samples import DataFacts, faults_of


@final
@dataclass(frozen=True, kw_only=True)
class TextOutput:
    """How tokens become text, and how many of them may be written."""

    # Writes tokens as text, without special ones; None leaves them numbers
    decode: Callable[[Sequence[int]], str] | None = None
    ends: Collection[int] = ()  # each of them ends a text
    most: int = 64  # tokens that are written
    limit: int | None = None  # most tokens of a row, those that it begins with counted
    # Beyond the vocabulary of the data lie rows of a padded table, which stand for no token
    vocab_size: int | None = None

    @classmethod
    def of(cls, facts: DataFacts, most: int, max_positions: int | None) -> Self:
        """Take what data know of their tokens, for a model of so many positions."""
        ends = [*facts.answer_ends]
        if facts.prompt is not None:
            with faults_of("`prompt` of the data"):
                ends += facts.prompt("a")[1]
        return cls(
            decode=facts.decode_answer or facts.decode,
            ends=frozenset(ends),
            most=most,
            limit=min(filter(None, (facts.max_length, max_positions)), default=None),
            vocab_size=facts.vocab_size,
        )

    def text_behind(self, begun: Sequence[int], tokens: Sequence[int]) -> str | list[int]:
        """Write what follows the tokens that a row begins with."""
        if self.decode is None:
            return [*tokens]
        # Of the whole: what stands alone may be decoded without the space before it.
        return self.decode([*begun, *tokens])[len(self.decode(begun)) :]


def continued(
    next_logits: Callable[[Tensor], Tensor],
    begun: Tensor,
    text: TextOutput,
    lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Append the likeliest token to each row until it is ended, and give what was appended.

    `begun` is `(batch, time)`, padded behind `lengths`, and `next_logits` gives `(batch, time,
    vocabulary)` for rows without padding: all begin as the shortest one, and a longer one takes its
    own tokens first. Each token costs a forward of whole rows: nothing is cached between two.
    """
    lengths = lengths or [begun.shape[1]] * len(begun)
    shortest, longest = min(lengths), max(lengths)
    rows, end = begun[:, :shortest], longest + text.most
    if text.limit is not None:
        end = min(end, text.limit)
    starts = torch.tensor(lengths, device=rows.device)
    ends = torch.tensor(sorted(text.ends), dtype=rows.dtype, device=rows.device)
    is_open = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for at in range(shortest, end):
        tokens = next_logits(rows)[:, -1, : text.vocab_size].argmax(-1)
        is_written = starts <= at
        if at < longest:
            tokens = torch.where(is_written, tokens, begun[:, at])
        rows = torch.cat([rows, tokens[:, None]], dim=1)
        is_open &= ~(is_written & torch.isin(tokens, ends)) & (at + 1 < starts + text.most)
        if not is_open.any():
            break
    found = list[list[int]]()
    for row, begin in zip(rows.tolist(), lengths, strict=True):
        # A row that is ended was continued for the sake of the others.
        written = row[begin : begin + text.most]
        found.append([*takewhile(lambda token: token not in text.ends, written)])
    return found
