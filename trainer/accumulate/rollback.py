"""Roll back the declared state of a model: what its forwards move and no gradient updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from trainer.core.declared_state import parts_of, undo_numbers, undo_other_state
from trainer.core.tensors import is_sharded


def _rescaled_tables(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Give the weights that a forward writes to: of an embedding with `max_norm`, not in shards."""
    for table in modules:
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag) or table.max_norm is None:
            continue
        if not is_sharded(table.weight):
            yield table.weight


@final
class Snapshot:
    """Keeps a model's declared state as it was before a step.

    Trained weights are the optimizer's, and not copied but where an embedding with `max_norm`
    scales them in its forward. `others` are objects that a forward may move besides, such as the
    objective: of a module its state as the model's, of any other its generators.
    """

    def __init__(self, model: nn.Module, *others: object) -> None:
        self._roots = (model, *others)
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # tensors and copies, by identity
        self._undo: list[Callable[[], object]] = []

    def take(self) -> None:
        """Copy the state, where it was copied before into the same memory."""
        modules, tensors = list[nn.Module](), list[Tensor]()
        self._buffers = []
        for part in parts_of(*self._roots):
            if not isinstance(part, nn.Module):
                continue
            modules.append(part)
            for name, buffer in part._buffers.items():
                self._buffers.append((part._buffers, name, buffer))
                if buffer is not None:
                    tensors.append(buffer)
        tensors += _rescaled_tables(modules)
        before, self._copies = self._copies, {}
        by_dtype = defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
        # Several modules may share one, which is copied once.
        for tensor in {id(each): each for each in tensors}.values():
            dimensions = zip(tensor.shape, tensor.stride(), strict=True)
            # PyTorch refuses to write where several elements share memory, as where expanded.
            if any(size > 1 and not stride for size, stride in dimensions):
                continue
            _, copied = before.get(id(tensor), (None, None))
            if copied is None or (copied.shape, copied.dtype) != (tensor.shape, tensor.dtype):
                copied = torch.empty_like(tensor)
            self._copies[id(tensor)] = tensor, copied
            to, source = by_dtype[tensor.dtype]
            to.append(copied)
            source.append(tensor)
        with torch.no_grad():
            # A few kernels, not one for each buffer
            for to, source in by_dtype.values():
                torch._foreach_copy_(to, source)
        # A number may say how far a buffer is filled, as rotary positions have it.
        self._undo = [*undo_other_state(*self._roots), *undo_numbers(modules)]

    def restore(self) -> None:
        """Put the state back; a buffer that a forward replaced by another tensor, too."""
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer
        with torch.no_grad():
            for tensor, copied in self._copies.values():
                if tensor.shape == copied.shape:
                    tensor.copy_(copied)
                else:
                    # Another shape is given through `.data` alone.
                    tensor.data = copied.clone()
        # Generators and what `get_extra_state` gives.
        for undo in self._undo:
            undo()
