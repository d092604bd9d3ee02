"""Predict tokens that are hidden from the model: masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
    tokenizer: Any = field(default=None, repr=False, compare=False)  # of any library

    def __post_init__(self) -> None:
        """Refuse a tokenizer without a mask token."""
        if getattr(self.tokenizer, "mask_token_id", None) is None:
            raise ConfigError(
                "objective=masked_lm: the tokenizer has no mask token: type tokenizer.path=FOLDER, "
                "of one that has; for labels that hide tokens already, objective=token_classify"
            )

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens there are to draw from."""
        return len(self.tokenizer)

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that are never hidden."""
        special = {*getattr(self.tokenizer, "all_special_ids", ())}
        for name in SPECIAL:
            special.add(getattr(self.tokenizer, name, None))
        return tuple(sorted(special - {None}))

    def prepare(self, sample: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Hide tokens of one sample; what is not hidden is labelled -100."""
        ids = sample["input_ids"].long()
        # On the host, before collation: the draws are those of the sample, whatever the cut is.
        chosen = torch.rand(ids.shape) < self.mlm_probability
        chosen &= ~torch.isin(ids, torch.tensor(self.special_ids))
        chosen &= sample.get("labels", ids) != IGNORED
        how, words = torch.rand(ids.shape), torch.randint(self.vocab_size, ids.shape)
        # Below 0.8 the mask, from there to 0.9 a random token, above it the token itself
        words = torch.where(how < REPLACED, self.tokenizer.mask_token_id, words)
        hidden = torch.where(chosen & (how < CHANGED), words, ids)
        return {**sample, "input_ids": hidden, "labels": ids.masked_fill(~chosen, IGNORED)}

    def targets(self, fields: Fields) -> Tensor:
        """See the base class."""
        return sequences_of(fields).long()
