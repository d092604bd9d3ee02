"""Refuse models that are not plain modules of dense, finished tensors."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.core.errors import ConfigError

WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Classes of PyTorch that wrap or shard a model; known by name, since to import them takes long."""


def check_unwrapped(model: nn.Module) -> nn.Module:
    """Give a model back that the trainer can shard or replicate itself.

    Raises:
        ConfigError: it is sharded already, or parameters still wait for a first forward.
    """
    for name, part in chain(model.named_modules(), model.named_parameters(), model.named_buffers()):
        kinds = {k.__name__ for k in type(part).__mro__ if k.__module__.startswith("torch.")}
        if found := kinds & (WRAPPERS | {"DTensor"}):
            where = f" at {name}" if name else ""
            raise ConfigError(
                f"model: holds a {found.pop()}{where}: `parallel` puts the model on the ranks "
                "itself; give the plain module"
            )
        if isinstance(part, Tensor) and is_lazy(part):
            raise ConfigError(
                f"model: {name} has no shape before the first forward: give lazy modules their "
                "sizes, e.g. nn.Linear in place of nn.LazyLinear"
            )
    return model


def refuse_sparse(model: nn.Module) -> None:
    """Refuse layers that are built to give sparse gradients, unless frozen, and sparse tensors.

    Raises:
        ConfigError: naming the first one, and what to do.
    """
    for name, part in model.named_modules():
        is_table = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        if is_table and part.sparse and part.weight.requires_grad:
            raise ConfigError(_of_gradient(f"{name}.weight".lstrip(".")))
        # Registered, or a plain attribute.
        for entries in (part._parameters, part._buffers, vars(part)):
            for own, tensor in entries.items():
                if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
                    raise ConfigError(
                        f"model: {f'{name}.{own}'.lstrip('.')} is a sparse tensor, which is not "
                        "reduced or saved here: hold its indices and its values as buffers, and "
                        "put them together in forward, or make it dense"
                    )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse gradients that are there and sparse, whatever made them.

    Raises:
        ConfigError: naming the first one's parameter, and what to do.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ConfigError(_of_gradient(name))


def _of_gradient(name: str) -> str:
    return (
        f"model: {name} gets sparse gradients, which are not clipped, reduced or saved here: build "
        "its embedding with sparse=False, whose gradient holds the same numbers"
    )
