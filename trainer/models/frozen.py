"""Keep a frozen model beside the one that is trained, for a loss that compares the two.

It is a child of the trained module whose own forward never calls it. So it is laid out over ranks,
and counted in memory, with the rest; a checkpoint treats its weights as any that are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.core.tensors import InMemoryTensor, LazyTensor
from trainer.models.facts import BESIDE, FACTS
from trainer.models.first_weights import FIRST_WEIGHTS, is_on_meta

MakeFrozen = Callable[[nn.Module], nn.Module | None]
"""Gives the frozen model for one that is to be trained; None where it needs none."""


def frozen_of(module: nn.Module) -> nn.Module | None:
    """Give the frozen model beside a module, if there is one."""
    return module._modules.get(BESIDE)


def is_beside(name: str) -> bool:
    """Whether a name is that of a weight, or part, of the frozen model."""
    return f"{name}.".startswith(f"{BESIDE}.")


def without_frozen(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is of the frozen model, by names of a model's weights."""
    return {name: value for name, value in by_name.items() if not is_beside(name)}


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters of a module by each of their names, without those beside it."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not is_beside(name):
            yield name, parameter


def add_frozen(
    module: nn.Module, make: MakeFrozen, weights: Mapping[str, LazyTensor], device: torch.device
) -> dict[str, LazyTensor]:
    """Put the frozen model beside a module; gives what its weights on the meta device begin with.

    `weights` are the module's own, which a copy of it begins with, too.
    """
    frozen = make(module)
    if frozen is None:
        return {}
    for part in frozen.modules():
        # They are of the model that is trained.
        vars(part).pop(FACTS, None)
    begins: Mapping[str, LazyTensor] = vars(frozen).pop(FIRST_WEIGHTS, weights)
    if begins is weights and is_on_meta(module) and not is_on_meta(frozen):
        named = frozen.named_parameters(remove_duplicate=False)
        begins = {name: InMemoryTensor(parameter.detach()) for name, parameter in named}
    frozen._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call] # untyped in torch
    module.add_module(BESIDE, frozen.requires_grad_(False).eval())
    return {f"{BESIDE}.{name}": value for name, value in begins.items()}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluate without dropout, and leave each submodule in the mode it was found in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
