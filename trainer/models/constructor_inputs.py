"""What a constructor that is recorded brings from elsewhere: arrays, buffers, tensors of others.

Nothing tells when these are written, and a record holds what they were when they were read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor

from trainer.core.bits import bits_of


@final
class Outside:
    """Values from elsewhere, as they were when a constructor brought them."""

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._lent: set[int] = set()

    def take(self, tensor: Tensor) -> Tensor:
        """Copy what is there now, and keep its memory from being another's."""
        copy = tensor.detach().clone()
        self._taken.append((tensor.detach(), copy))
        return copy

    def lend(self, func: Any, tensors: Iterable[Tensor], storages: Iterable[int]) -> None:  # noqa: ANN401 - an operation
        """Note storages that share an array's memory, where an operation gives a view of one.

        Args:
            func: the operation.
            tensors: from elsewhere, that it was given.
            storages: that hold its result.
        """
        is_view = any(given.alias_info is not None for given in func._schema.returns)
        # What PyTorch has allocated for a tensor of its own, as `torch.tensor` does, can grow.
        if is_view and not all(tensor.untyped_storage().resizable() for tensor in tensors):
            self._lent.update(storages)

    def shares(self, storages: Iterable[int]) -> bool:
        """Tell whether writing into one of these storages would write into an array."""
        return not self._lent.isdisjoint(storages)

    def is_unchanged(self) -> bool:
        """Tell whether all is still as it was, bit for bit; lets go of it."""
        taken, self._taken = self._taken, []
        return all(bytes_of(now) == bytes_of(then) for now, then in taken)


def bytes_of(tensor: Tensor) -> bytes:
    """Give the bytes of a tensor on the CPU."""
    return bits_of(tensor).numpy().tobytes()
