"""Check that a model can be trained here, and how many tokens and labels it knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError, DataError


def required(name: str, value: int | None) -> int:
    """Give a number that a model needs, by its key, or that the data have."""
    if value is None:
        raise ConfigError(f"model.{name}=null: the data do not say it; type a number")
    return value


def refuse_dtypes(error: Exception, model: nn.Module, fields: Mapping[str, Any]) -> None:
    """Name the field whose dtype is not that of the weights, where a forward failed over it.

    Nothing is cast unasked: an image's scale, and what a float64 is rounded to, are the user's.
    """
    text = " ".join(str(error).split())
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not weights or "indices" in text or not re.search("type|implemented", text):
        return
    wanted = min(weights, key=str)
    for name, field in fields.items():
        if not isinstance(field, Tensor) or field.dtype in weights:
            continue
        # What it holds as PyTorch's errors have it, in words of Python or of C++
        kind = field.type().rpartition(".")[2].removesuffix("Tensor")
        kinds = f"{kind}|{str(field.dtype).removeprefix('torch.')}"
        kinds = kinds.replace("Byte", "Byte|unsigned char")
        if not re.search(rf"\b({kinds})\b", text, re.IGNORECASE):
            continue
        remedy = f"{name}.to({wanted}), of an array {name}.astype(np.{str(wanted)[6:]})"
        if not field.is_floating_point():
            remedy += f", or an image's {name}.to({wanted}) / 255"
        raise DataError(
            f"data: field {name} is {field.dtype}, and the weights of {type(model).__name__} are "
            f"{wanted} ({text:.99}): convert it in the data set, e.g. {remedy}"
        ) from error


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Put back what the block writes into buffers: the mean of no samples is not a number."""
    entries = []
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                entries.append((part._buffers, name, buffer, buffer.clone()))
    yield
    with torch.no_grad():
        for owner, name, buffer, copy in entries:
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)
            owner[name] = buffer


def vocabulary_of(module: nn.Module) -> int | None:
    """Count the token ids of a model that offers `get_input_embeddings`, as Hugging Face's do."""
    try:
        table = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # one of another kind, or without tokens
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None
