"""Sparse weights, gradients and buffers, which nothing here clips, reduces or saves: refused."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError


def refuse_sparse(model: nn.Module) -> None:
    """Refuse layers that are built to give sparse gradients, and tensors that are sparse.

    Frozen layers give no gradient.

    Raises:
        ConfigError: naming the first one, and what to do.
    """
    for name, part in model.named_modules():
        is_table = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        if is_table and part.sparse and part.weight.requires_grad:
            raise ConfigError(_of_gradient(f"{name}.weight".lstrip(".")))
        for own, tensor in _tensors(part):
            if tensor.layout != torch.strided:
                raise ConfigError(
                    f"model: {f'{name}.{own}'.lstrip('.')} is a sparse tensor, which is not kept, "
                    "reduced or saved here: hold its indices and its values as buffers, and put "
                    "them together in forward, or make it dense"
                )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse gradients that are there and sparse, whatever made them.

    Raises:
        ConfigError: naming the first one's parameter, and what to do.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ConfigError(_of_gradient(name))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """List what a module itself holds, registered or as an attribute.

    Yields:
        Names and tensors.
    """
    for entries in (module._parameters, module._buffers, vars(module)):
        yield from ((name, it) for name, it in entries.items() if isinstance(it, Tensor))


def _of_gradient(name: str) -> str:
    return (
        f"model: {name} gets sparse gradients, which are not clipped, reduced or saved here: build "
        "its embedding with sparse=False, whose gradient holds the same numbers"
    )
