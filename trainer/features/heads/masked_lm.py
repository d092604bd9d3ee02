"""Predict tokens that are hidden from the model: masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.config.components import Share
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.objectives.next_token import TokenEntropy, sequences_of

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
REPLACED, CHANGED = 0.8, 0.9
"""Of the chosen tokens 80 % become the mask, 10 % a random token, and 10 % stay."""


@dataclass(frozen=True, kw_only=True)
class MaskedLM(TokenEntropy):
    """Cross entropy of tokens chosen at random, as BERT has it (Devlin et al. 2019, 1810.04805).

    They are drawn for each sample and epoch. Special tokens are never chosen, nor is a position
    that the data label -100. A sample may have none of them: it then has no loss term.
    """

    mlm_probability: Share = 0.15  # chance of a token to be chosen
    tokenizer: InitVar[Any] = None
    mask_id: int = field(init=False)
    vocab_size: int = field(init=False)
    special_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - of any library
        """Read what the tokenizer says of its tokens.

        Raises:
            ConfigError: it has no mask token.
        """
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None:
            raise ConfigError(
                "objective=masked_lm: the tokenizer has no mask token: type tokenizer.path=FOLDER, "
                "of one that has; for labels that hide tokens already, objective=token_classify"
            )
        special = {getattr(tokenizer, name, None) for name in SPECIAL}
        special |= {*getattr(tokenizer, "all_special_ids", ())}
        object.__setattr__(self, "mask_id", mask)
        object.__setattr__(self, "vocab_size", len(tokenizer))
        object.__setattr__(self, "special_ids", tuple(sorted(special - {None})))

    def prepare(self, sample: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Hide tokens of one sample; what is not hidden is labelled -100."""
        ids = sample["input_ids"].long()
        chosen = torch.rand(ids.shape) < self.mlm_probability
        chosen &= ~torch.isin(ids, torch.tensor(self.special_ids))
        chosen &= sample.get("labels", ids) != IGNORED
        how, words = torch.rand(ids.shape), torch.randint(self.vocab_size, ids.shape)
        words = torch.where(how < REPLACED, self.mask_id, words)
        hidden = torch.where(chosen & (how < CHANGED), words, ids)
        return {**sample, "input_ids": hidden, "labels": ids.masked_fill(~chosen, IGNORED)}

    def targets(self, fields: Fields) -> Tensor:
        """See the base class."""
        return sequences_of(fields).long()
