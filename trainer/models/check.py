"""What a constructor may not give: a model that is spread already, or that is not finished."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.nn.parameter import is_lazy

from trainer.core.errors import ConfigError

WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
}
"""Classes of PyTorch that spread a model; known by name, since to import them takes long."""


def check_unwrapped(model: nn.Module) -> nn.Module:
    """Give a model back that the trainer can spread over ranks itself.

    Raises:
        ConfigError: it is spread already, or parameters still wait for a first forward.
    """
    for name, part in model.named_modules():
        found = _of_torch(part) & WRAPPERS
        if found:
            where = f" at {name}" if name else ""
            raise ConfigError(
                f"model: holds a {found.pop()}{where}: `parallel` spreads the model over the ranks "
                "itself; give the bare module"
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if "DTensor" in _of_torch(tensor):
            raise ConfigError(
                f"model: {name} is a DTensor: `parallel` spreads the model over the ranks itself; "
                "give the bare module"
            )
        if is_lazy(tensor):
            raise ConfigError(
                f"model: {name} has no shape before the first forward: give lazy modules their "
                "sizes, e.g. nn.Linear in place of nn.LazyLinear"
            )
    return model


def _of_torch(thing: object) -> set[str]:
    kinds = type(thing).__mro__
    return {kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] == "torch"}
