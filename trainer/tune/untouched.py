"""Runs a live model without a trace: what a rehearsal changes is put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put a model and the random generators back bit for bit when the block ends.

    Covers buffers, `.grad`, the attributes of every module and what lists, mappings and sets
    among them hold, and the random state of torch on the CPU and the model's GPU, of Python and
    of NumPy. Weights are not copied: forward and backward do not change them. Inside, `.grad` is
    None.

    Args:
        model: not wrapped for several ranks; one rank may do this alone.
    """
    undo = [_attributes(module) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    python_state, numpy_state = random.getstate(), np.random.get_state()
    on_gpu = {p.device.index for p, _ in gradients if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(on_gpu)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for restore in undo:
            restore()
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _attributes(module: nn.Module) -> Callable[[], None]:
    """Remember a module's attributes and, one level deep, what its containers hold."""
    attributes = vars(module)
    saved = dict(attributes)
    held = [(value, list(_entries(value))) for value in saved.values() if _is_container(value)]

    def restore() -> None:
        attributes.clear()
        attributes.update(saved)
        for container, entries in held:
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(entries)

    return restore


def _is_container(value: Any) -> bool:  # noqa: ANN401 - any attribute
    return isinstance(value, dict | set | list | deque)


def _entries(container: Any) -> Iterable[Any]:  # noqa: ANN401 - one of the above
    return container.items() if isinstance(container, dict) else container
