"""Continue a prompt by the `generate` of a model of transformers, which keeps keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.core.user_code import quiet
from trainer.models.facts import Continuation

GENERATING = ("causal_lm", "seq2seq_lm")
"""Tasks of models that write text behind text."""


def continue_prompt(
    model: Any,  # noqa: ANN401 - of transformers, untyped
    asked: Continuation,
    put: Callable[[int], object],
) -> None:
    """Call with each token that follows a prompt, as it comes.

    What the model's generation settings say of repetitions, or of tokens to draw from, counts.
    """
    device = model.device
    ids = torch.tensor([[*asked.prompt]], device=device)
    stated = model.generation_config.eos_token_id
    if not isinstance(stated, list):
        stated = [stated]
    ends = {*asked.ends, *stated} - {None}
    options: dict[str, Any] = {
        "max_new_tokens": asked.most,
        "num_beams": 1,
        "do_sample": asked.temperature > 0,
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": asked.pad_token_id,
        "use_cache": True,
    }
    if asked.temperature:
        options["temperature"] = asked.temperature

    def only_known(_: Tensor, scores: Tensor) -> Tensor:
        # Beyond the vocabulary of the data lie rows of a padded table, which stand for no token.
        if asked.vocab_size is not None:
            scores[:, asked.vocab_size :] = -torch.inf
        return scores

    def put_newest(row: Tensor, _: object) -> Tensor:
        if (token := int(row[0, -1])) not in ends:
            put(token)
        # What ends a text transformers finds by itself.
        return torch.zeros(1, dtype=torch.bool, device=device)

    with quiet():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[only_known],
            stopping_criteria=[put_newest],
            **options,
        )
