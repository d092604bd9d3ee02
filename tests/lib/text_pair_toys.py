"""Pairs of texts, one small encoder in float64, and the step of a plain loop over all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.lib.hf_toys import save_tokenizer, write_lines

SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 2}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LINE = (
    "model=hf model.path=model model.task=embedding model.dtype=float64 data=hf "
    "data.path=pairs.jsonl steps=1 scheduler=constant clip_norm=null "
    "optimizer=sgd optimizer.lr=1 optimizer.momentum=0"
)
Gradients = dict[str, Tensor]


def save(records: list[dict[str, Any]], kind: str = "Bert", num_layers: int = 2) -> None:
    """Write a model of random weights, its tokenizer, and records."""
    torch.manual_seed(0)
    config = {"Bert": transformers.BertConfig, "Llama": transformers.LlamaConfig}[kind]
    settings = SIZES | {"num_hidden_layers": num_layers} | (DRY if kind == "Bert" else {})
    transformers.AutoModel.from_config(config(**settings)).save_pretrained("model")
    save_tokenizer(Path("model"), 300)
    write_lines(Path("pairs.jsonl"), records)


def loaded() -> torch.nn.Module:
    return transformers.AutoModel.from_pretrained("model", dtype=torch.float64).train()


def embedded(model: torch.nn.Module, texts: list[str], pooling: str = "mean") -> Tensor:
    """Embed texts as one writes it by hand."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    given = tokenizer(texts, padding=True, return_tensors="pt")
    hidden = model(**{n: given[n] for n in ("input_ids", "attention_mask")}).last_hidden_state
    mask = given["attention_mask"][..., None]
    ends = given["attention_mask"].sum(1) - 1
    found = {
        "mean": lambda: (hidden * mask).sum(1) / mask.sum(1),
        "cls": lambda: hidden[:, 0],
        "last": lambda: hidden[torch.arange(len(hidden)), ends],
    }
    return F.normalize(found[pooling](), dim=-1)


def step_of(
    loss: Callable[..., Tensor], count: int, size: int | None = None, **how: Any
) -> tuple[float, Gradients]:
    """Compute the mean of a loss sum over samples, or over parts of `size`, and its gradient."""
    model, total = loaded(), 0.0
    for start in range(0, count, size or count):
        part = loss(model, range(start, start + (size or count)), **how) / count
        part.backward()
        total += part.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error(found: Gradients, expected: Gradients) -> float:
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / largest
