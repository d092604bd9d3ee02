"""Runs a live model without a trace: what a rehearsal changes is put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

COPIED_BYTES = 64 * 2**20
"""Of frozen weights and plain tensors that are copied, the smallest first: codebooks, averages.

A frozen model under adapters would be another model; no forward moves it.
"""

FEW = 1000
"""Entries up to which a container is looked into."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put a model and the random generators back bit for bit when the block ends.

    Covers buffers, `.grad`, the attributes of every module with what lists, mappings and sets among
    them hold, the values of frozen weights and of plain tensors, generators of the model's own,
    and the random state of torch on the CPU and the model's GPU, of Python and of NumPy. Trained
    weights are not copied: forward and backward do not change them. NumPy arrays and other objects
    that a forward writes into are not either. Inside, `.grad` is None.

    Args:
        model: not wrapped for several ranks; one rank may do this alone.

    Raises:
        ConfigError: the block moved a tensor too large to be copied.
    """
    kept = _Kept(model)
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
        kept.restore()
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient
    kept.refuse_losses()


@final
class _Kept:
    """What the modules of a model hold, besides trained weights and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen = {id(buffer) for buffer in model.buffers()}
        self._tensors: list[Tensor] = []
        for module in model.modules():
            self._keep(vars(module))
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._uncopied: list[tuple[Tensor, int]] = []
        room = COPIED_BYTES
        for tensor in sorted(self._tensors, key=lambda tensor: tensor.nbytes):
            room -= tensor.nbytes
            if room >= 0:
                self._copies.append((tensor, tensor.detach().clone()))
            else:
                self._uncopied.append((tensor, tensor._version))

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for tensor, saved in self._copies:
                # What was expanded cannot be written, nor has it been.
                if not torch.equal(tensor, saved):
                    tensor.copy_(saved)

    def refuse_losses(self) -> None:
        """Tell of what cannot be put back.

        Raises:
            ConfigError: a tensor too large to be copied has moved.
        """
        for tensor, version in self._uncopied:
            if tensor._version != version:
                raise ConfigError(
                    f"model: its forward writes into a frozen weight or plain tensor of shape "
                    f"{tuple(tensor.shape)}, too large to be put back after a rehearsal: make it "
                    "a buffer (register_buffer)"
                )

    def _keep(self, value: Any) -> None:  # noqa: ANN401 - any attribute
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict | set | list | deque | tuple):
            self._keep_container(value)
        elif isinstance(value, Tensor):
            # What has a gradient is a trained weight, or a result of one.
            is_plain = value.layout == torch.strided and not value.is_meta
            if is_plain and not value.requires_grad and not value.is_inference():
                self._tensors.append(value)
        elif (state := _state_of(value)) is not None:
            self._undo.append(state)

    def _keep_container(self, container: Any) -> None:  # noqa: ANN401 - one of the above
        entries = [*_entries(container)]
        if not isinstance(container, tuple):
            self._undo.append(partial(_refill, container, entries))
        if len(entries) <= FEW:
            for value in container.values() if isinstance(container, dict) else entries:
                self._keep(value)


def _state_of(generator: object) -> Callable[[], None] | None:
    """Remember the state of a random generator of any kind; None for other things."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()

        def restore() -> None:
            generator.set_state(state)

        return restore
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return None


def _entries(container: Any) -> Iterable[Any]:  # noqa: ANN401 - a container
    return container.items() if isinstance(container, dict) else container


def _refill(container: Any, entries: Iterable[Any]) -> None:  # noqa: ANN401 - one that changes
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(entries)
