"""Roll back the declared state of a model: what its forwards move and no gradient updates.

Declared are buffers, saved in checkpoints or not; random generators among the attributes of
modules; and what `get_extra_state` gives. Every other attribute stays as the forward made it: a
flag put back without the hooks that it stands for would have the next forward register them again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor

Copies = dict[int, tuple[Tensor, Tensor]]
"""Tensors with their copies, by identity."""

GENERATORS = (Generator, np.random.Generator, np.random.RandomState, random.Random)


@final
class Snapshot:
    """Keeps a model's declared state as it was before a step.

    Trained weights are the optimizer's, and not copied but where an embedding with `max_norm`
    scales them in its forward.

    Args:
        model: on its device.
        others: objects that a forward may move besides, such as the objective: a module's state
            as the model's, of any other its generators.
    """

    def __init__(self, model: nn.Module, *others: object) -> None:
        self._roots = (model, *others)
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._copies: Copies = {}
        self._undo: list[Callable[[], object]] = []

    def take(self) -> None:
        """Copy the state, where it was copied before into the same memory."""
        modules = [part for part in _parts(*self._roots) if isinstance(part, nn.Module)]
        self._buffers = [(m._buffers, name, b) for m in modules for name, b in m._buffers.items()]
        tensors = [buffer for *_, buffer in self._buffers if buffer is not None]
        self._copies = _copied([*tensors, *_renormalised(modules)], self._copies)
        self._undo = [_undo_of(generator) for generator in own_generators(*self._roots)]
        self._undo += [_undo_extra(m) for m in modules if _has_extra_state(m)]

    def restore(self) -> None:
        """Put the state back; a buffer that a forward replaced by another tensor, too."""
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer
        with torch.no_grad():
            for tensor, copied in self._copies.values():
                if tensor.shape == copied.shape:
                    tensor.copy_(copied)
                else:  # through `.data`, which may change it
                    tensor.data = copied.clone()
        for undo in self._undo:
            undo()


def _parts(*roots: object) -> Iterator[object]:
    for root in roots:
        yield from root.modules() if isinstance(root, nn.Module) else (root,)


def own_generators(*roots: object) -> Iterator[Any]:
    """Find the random generators among the attributes of modules and of other objects.

    Yields:
        Each of them.
    """
    for part in _parts(*roots):
        values = getattr(part, "__dict__", {}).values()
        yield from (value for value in values if isinstance(value, GENERATORS))


def _renormalised(modules: list[nn.Module]) -> Iterator[Tensor]:
    """Find the weights that a forward scales in place; shards are their mechanism's.

    Yields:
        Each.
    """
    tables = [part for part in modules if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    weights = (table.weight for table in tables if table.max_norm is not None)
    yield from (weight for weight in weights if not isinstance(weight, DTensor))


def _copied(tensors: list[Tensor], known: Copies) -> Copies:
    """Copy tensors: on a GPU, those that were copied before in a few kernels."""
    copies: Copies = {}
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if id(tensor) in copies or _is_expanded(tensor):
            continue
        _, copied = known.get(id(tensor), (None, None))
        if copied is not None and copied.shape == tensor.shape and copied.dtype == tensor.dtype:
            into, of = pairs.setdefault(tensor.dtype, ([], []))
            into.append(copied)
            of.append(tensor)
        else:
            copied = tensor.detach().clone()
        copies[id(tensor)] = tensor, copied
    with torch.no_grad():
        for into, of in pairs.values():
            torch._foreach_copy_(into, of)
    return copies


def _is_expanded(tensor: Tensor) -> bool:
    """Tell whether several elements share memory, into which PyTorch refuses to write."""
    return any(not step and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))


def _undo_of(generator: Any) -> Callable[[], object]:  # noqa: ANN401 - of any kind
    """Remember the state of a random generator."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _undo_extra(module: nn.Module) -> Callable[[], object]:
    state = copy.deepcopy(module.get_extra_state())
    # A copy each time: the module may go on with what it is given.
    return lambda: module.set_extra_state(copy.deepcopy(state))
