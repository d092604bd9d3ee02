"""Continue a prompt by forwards of a model, where its library has no way of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.data.collate import ATTENTION_MASK
from trainer.data.samples import INPUT_IDS
from trainer.models.facts import Continuation
from trainer.objectives.base import ModelCall, logits_of


def continue_by_forward(
    call: ModelCall, device: torch.device, asked: Continuation, put: Callable[[int], object]
) -> None:
    """Call with each token that follows a prompt; each costs a forward of all before it."""
    row = torch.tensor([[*asked.prompt]], device=device)
    for _ in range(asked.most):
        logits = logits_of(call({INPUT_IDS: row, ATTENTION_MASK: torch.ones_like(row)}))
        # Beyond the vocabulary of the data lie rows of a padded table, which stand for no token.
        scores = logits[0, -1, : asked.vocab_size]
        token = int(scores.argmax())
        if asked.temperature:
            shares = (scores.double() / asked.temperature).softmax(-1)
            token = int(torch.multinomial(shares, 1))
        if token in asked.ends:
            return
        row = torch.cat([row, row.new_tensor([[token]])], dim=1)
        put(token)
