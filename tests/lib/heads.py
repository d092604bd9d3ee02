"""Classes of transformers, tiny, random and built from their configs, and what they train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from trainer.objectives.model_loss import ModelLoss

VOCABULARY, NUM_LABELS = 19, 3

ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": NUM_LABELS,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 40,
    "num_labels": NUM_LABELS, "classifier_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEOX = {**DECODER, "attention_dropout": 0.0, "hidden_dropout": 0.0}
SPAN = ENCODER | {"num_labels": 2}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 40,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0,
    "num_labels": NUM_LABELS, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2,
    "dropout_rate": 0.0, "classifier_dropout": 0.0, "num_labels": NUM_LABELS,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12, "max_position_embeddings": 40, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "classifier_dropout": 0.0, "num_labels": NUM_LABELS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
MIXTRAL = {**DECODER, "num_local_experts": 3, "num_experts_per_tok": 1}


@dataclass(frozen=True)
class Head:
    """A class of transformers, what its config says, and what it is trained on."""

    name: str
    config: str
    values: Mapping[str, Any]
    data: str
    mean_is_exact: bool = True

    def build(self) -> nn.Module:
        config = getattr(transformers, self.config)(**self.values)
        config._attn_implementation = config._experts_implementation = "eager"
        return getattr(transformers, self.name)(config)

    def objective(self, reduction: str) -> ModelLoss:
        return ModelLoss(reduction=reduction, causal=self.data == "causal")


class Examples:
    """Ragged token sequences with the labels that one kind of head takes."""

    draws_randomness = False

    def __init__(self, kind: str) -> None:
        self.kind = kind
        numbers = np.random.default_rng(3)
        most = 5 if kind in {"choice", "span"} else 14
        self.lengths = numbers.integers(4, most, size=24).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        length = int(self.lengths[index])
        make = torch.Generator().manual_seed(index)

        def draw(high: int, *size: int) -> Tensor:
            return torch.randint(0, high, size, generator=make)

        tokens = draw(VOCABULARY - 4, length) + 3
        hidden = draw(3, length) == 0
        if self.kind == "choice":
            return {"input_ids": draw(VOCABULARY, 3, length), "labels": draw(3)}
        if "span" in self.kind:
            ends = {"start_positions": draw(length), "end_positions": draw(length)}
            return {"input_ids": tokens, **ends}
        labels = {
            "causal": lambda: tokens.masked_fill(hidden, -100),
            "tags": lambda: draw(NUM_LABELS, length).masked_fill(hidden, -100),
            "masked": lambda: tokens.masked_fill(~hidden, -100),
            "tagged words": lambda: tokens.masked_fill(hidden, -100),
            "binary": lambda: draw(2, length).masked_fill(hidden, -100),
            "class": lambda: draw(NUM_LABELS),
            "pair": lambda: draw(2),
        }
        return {"input_ids": tokens, "labels": labels[self.kind]()}


BERT = Head(
    "BertForMaskedLM",
    "BertConfig",
    ENCODER | {"num_hidden_layers": 2, "output_hidden_states": True},
    "masked",
)
BUILT: list[nn.Module] = []
"""What `bert` gave."""


def bert() -> nn.Module:
    """Build a model for the command line, and remember it."""
    BUILT.append(BERT.build())
    return BUILT[-1]


def masked() -> Examples:
    """Give data for it."""
    return Examples("masked")
