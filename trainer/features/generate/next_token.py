"""Score the token behind each of some rows of tokens, and choose one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.data.collate import ATTENTION_MASK
from trainer.data.samples import INPUT_IDS
from trainer.models.facts import Continuation
from trainer.objectives.base import ModelCall, logits_of

Tokens = list[int]


def scores_behind(
    call: ModelCall,
    rows: Sequence[Tokens],
    length: int,
    device: torch.device,
    *,
    pad_token_id: int | None,
    vocab_size: int | None,
) -> Tensor:
    """Give the logits of the token behind each row, `(rows, vocab)`, of those that can be decoded.

    Rows are padded to `length`.
    """
    ids = torch.full((len(rows), length), pad_token_id or 0, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    # On the right: positions are counted from the left, and a causal model sees no padding there.
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    logits = logits_of(call({INPUT_IDS: ids.to(device), ATTENTION_MASK: mask.to(device)}))
    last = torch.tensor([*map(len, rows)], device=logits.device) - 1
    places = torch.arange(len(rows), device=logits.device)
    # Beyond the vocabulary of the data lie rows of a padded table, which stand for no token.
    return logits[places, last, :vocab_size]


def continue_by_forward(
    call: ModelCall, device: torch.device, asked: Continuation, put: Callable[[int], object]
) -> None:
    """Call with each token that follows a prompt; each costs a forward of all before it."""
    row = [*asked.prompt]
    for _ in range(asked.most):
        scores = scores_behind(
            *(call, [row], len(row), device),
            pad_token_id=asked.pad_token_id,
            vocab_size=asked.vocab_size,
        )
        token = int(scores.argmax(-1))
        if asked.temperature:
            shares = (scores.double() / asked.temperature).softmax(-1)
            token = int(torch.multinomial(shares, 1))
        if token in asked.ends:
            return
        row.append(token)
        put(token)
