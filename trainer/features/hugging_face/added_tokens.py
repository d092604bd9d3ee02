"""Add tokens to a tokenizer, and begin their rows of a model as the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer.core.errors import ConfigError
from trainer.models.first_weights import FIRST_WEIGHTS

KNOWN = "known_words"
"""Attribute of a tokenizer: words that were to be added, and that are tokens of it already."""
NEW_IDS = "new_token_ids"
"""Attribute of a tokenizer: the ids of what was added."""


def with_tokens(tokenizer: Any, words: Sequence[str] | None) -> Any:  # noqa: ANN401 - of any class
    """Add words to a tokenizer, each of which is then one token wherever it stands.

    They are not special: decoded text shows them, as a format of answers needs.
    """
    if not words:
        return tokenizer
    from tokenizers import AddedToken  # noqa: PLC0415 - only for this option

    if not all(map(str.strip, words)):
        raise ConfigError("tokenizer.add: holds an empty word; leave it out")
    before = tokenizer.get_vocab()
    new = [word for word in words if word not in before]
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in new])
    setattr(tokenizer, KNOWN, [word for word in words if word in before])
    setattr(tokenizer, NEW_IDS, sorted({*tokenizer.convert_tokens_to_ids(new)}))
    return tokenizer


@torch.no_grad()
def begin_rows(model: Any, ids: Sequence[int]) -> None:  # noqa: ANN401 - of any class
    """Make rows of new tokens the mean of those of all tokens before them, in place.

    A table that is padded beyond its tokenizer has free rows, which are taken first. Weights that
    are tied, or the output layer's own, and its bias follow.
    """
    if not ids:
        return
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ConfigError(
            f"tokenizer.add: {type(model).__name__} has no table of tokens (nn.Embedding) whose "
            "rows could begin as a mean; leave it out"
        )
    if table.num_embeddings <= ids[-1]:
        model.resize_token_embeddings(ids[-1] + 1, mean_resizing=False)
    output = model.get_output_embeddings()
    tables = {id(part): part for part in (model.get_input_embeddings(), output) if part is not None}
    for part in tables.values():
        for name in ("weight", "bias"):
            tensor = getattr(part, name, None)
            if tensor is not None:
                tensor[list(ids)] = tensor[: ids[0]].mean(0, dtype=torch.float32).to(tensor.dtype)
    # They are in no file.
    vars(model).pop(FIRST_WEIGHTS, None)
