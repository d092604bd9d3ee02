"""Continue a prompt by the `generate` of a model of transformers, which keeps keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

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

    with quiet():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[only_known],
            streamer=_Tokens(put, ends),
            **options,
        )


@final
class _Tokens:
    """What transformers calls with tokens: first those of the prompt, then each new one."""

    def __init__(self, put: Callable[[int], object], ends: set[int]) -> None:
        self._put, self._ends, self._is_prompt = put, ends, True

    def put(self, ids: Tensor) -> None:
        """Pass on a token that ends nothing."""
        if not self._is_prompt and (token := int(ids.reshape(-1)[0])) not in self._ends:
            self._put(token)
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left over."""
