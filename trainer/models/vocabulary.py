"""Read off how many token ids a model has rows for, and how many labels it tells apart."""

from __future__ import annotations

from torch import nn

from trainer.models.gpt import GPT

_HEADS = ("SequenceClassification", "TokenClassification", "ImageClassification")
"""Hugging Face's models whose logits are `config.num_labels`, by the end of `For...`."""


def vocabulary_of(module: nn.Module) -> tuple[int | None, int | None]:
    """Give its numbers of token ids and labels, None where they are not known.

    Known are our own models and those that offer what Hugging Face's do.
    """
    if isinstance(module, GPT):
        return module.vocab_size, module.vocab_size
    rows, classes = (_size(module, f"get_{end}put_embeddings") for end in ("in", "out"))
    if type(module).__name__.endswith(_HEADS):
        classes = getattr(getattr(module, "config", None), "num_labels", None)
    return rows, classes


def _size(module: nn.Module, name: str) -> int | None:
    """Ask a Hugging Face model for the size of its vocabulary, before or after its layers."""
    try:
        table = getattr(module, name)()
    except (AttributeError, NotImplementedError):  # one of another kind, or without tokens
        return None
    return len(table.weight) if isinstance(table, nn.Embedding | nn.Linear) else None
