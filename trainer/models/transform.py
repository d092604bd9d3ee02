"""Change a model between its constructor and its layout over ranks: adapters, norms, freezing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

from torch import nn


class ModelTransform(ABC):
    """Takes a model and gives one; its fields are the keys of an entry of `transforms`.

    It sees the model on the CPU, with the weights that it begins with, and may change it in place,
    wrap it or make another. New weights are drawn from PyTorch's default generator, which the run's
    seed governs. A parameter stays the same object, also under another name, where it is to keep
    the values that `init=` gives it.
    """

    # Whether it draws on the meta device what it draws on the CPU, and reads no values, so that
    # no rank need hold the model whole under `parallel=fsdp`.
    draws_on_meta: bool = False
    # Whether it trains few new weights beside a frozen model, which take a larger learning rate.
    is_adapter: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, model: nn.Module) -> nn.Module:
        """Give the model that is trained; the same on every rank."""


@final
class Unchanged(ModelTransform):
    """Gives the model as it is."""

    draws_on_meta = True

    def __call__(self, model: nn.Module) -> nn.Module:
        """See the base class."""
        return model
