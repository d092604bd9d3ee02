"""Classes of transformers, tiny, random and built from their configs, and what they train on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from trainer.features.heads.model_loss import ModelLoss

VOCABULARY, NUM_LABELS = 19, 3

# Each config takes the names that it knows.
NO_DROPOUT = (
    *("dropout", "classifier_dropout", "attention_dropout", "hidden_dropout", "activation_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
NUM_HEADS = ("num_attention_heads", "n_head", "num_heads")
TINY: Mapping[str, Any] = {
    **{"vocab_size": VOCABULARY, "num_labels": NUM_LABELS, "num_key_value_heads": 1, "d_kv": 4},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 12),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 40),
    **dict.fromkeys((*NUM_HEADS, "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(LAYERS, 1) | dict.fromkeys(NO_DROPOUT, 0.0),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **{"num_local_experts": 3, "num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Head:
    """A class of transformers, what it is trained on, and what else its config says."""

    name: str
    config: str
    data: str
    values: Mapping[str, Any] = field(default_factory=dict)
    mean_is_exact: bool = True

    def build(self) -> nn.Module:
        config = getattr(transformers, self.config)(**TINY | self.values)
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


DEEP = {"num_hidden_layers": 2, "output_hidden_states": True}
BERT = Head("BertForMaskedLM", "BertConfig", "masked", DEEP)
BUILT: list[nn.Module] = []
"""What `bert` gave."""


def bert() -> nn.Module:
    """Build a model for the command line, and remember it."""
    BUILT.append(BERT.build())
    return BUILT[-1]


def masked() -> Examples:
    return Examples("masked")


MASKED: list[bool] = []
"""Whether a mask was given, for each call of what `gpt2` gave and of its copies."""


def gpt2() -> nn.Module:
    """Build a causal model for the command line, whose calls are noted."""
    model = Head("GPT2LMHeadModel", "GPT2Config", "causal").build()
    model.register_forward_pre_hook(
        lambda _, __, kwargs: MASKED.append("attention_mask" in kwargs), with_kwargs=True
    )
    return model


def causal() -> Examples:
    return Examples("causal")


def classifier() -> nn.Module:
    """Build a model for the command line that has no output layer for words."""
    return Head("BertForSequenceClassification", "BertConfig", "class").build()


def classified() -> Examples:
    return Examples("class")


def unshifted() -> nn.Module:
    """Build a causal model that takes its labels as they are."""
    return Head("BartForCausalLM", "BartConfig", "causal").build()


def save_causal_model(folder: Path, **options: Any) -> None:
    """Save a model whose file holds bf16, as most on the hub do."""
    torch.manual_seed(0)
    model = Head("GPT2LMHeadModel", "GPT2Config", "causal").build()
    model.to(torch.bfloat16).save_pretrained(folder, **options)


def save_tokens(folder: Path, kind: str = "causal") -> None:
    """Save samples as the library `datasets` does, in columns of numbers."""
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    examples = Examples(kind)
    rows = [{n: v.tolist() for n, v in examples[i].items()} for i in range(len(examples))]
    datasets.Dataset.from_list(rows).save_to_disk(folder)
