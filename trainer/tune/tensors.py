"""Count the bytes of live tensors, real and fake alike, and says what they belong to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Part = Literal["parameters", "buffers", "gradients", "optimizer_state", "activations"]
"""What a tensor belongs to; `activations` is everything that is none of the others."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The most tensor bytes alive at once during a step, and what they were at that moment.

    Allocator rounding, fragmentation and the scratch space inside kernels are not tensors.

    Attributes:
        peak_bytes: the sum of all parts.
        parameters: bytes of the weights.
        gradients: bytes of accumulated gradients.
        optimizer_state: bytes the optimizer keeps between steps.
        activations: bytes of everything else: inputs, saved for backward, temporaries.
        buffers: bytes of the model's buffers.
    """

    peak_bytes: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    buffers: int

    @classmethod
    def of(cls, parts: Mapping[Part, int]) -> Self:
        """Add up the parts."""
        return cls(
            peak_bytes=sum(parts.values()),
            parameters=parts.get("parameters", 0),
            gradients=parts.get("gradients", 0),
            optimizer_state=parts.get("optimizer_state", 0),
            activations=parts.get("activations", 0),
            buffers=parts.get("buffers", 0),
        )

    def to_dict(self) -> dict[str, int]:
        """Give a mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave.

        Raises:
            KeyError: a part is missing.
        """
        return cls(**{field.name: int(saved[field.name]) for field in fields(cls)})


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """List where a tensor's numbers are on this rank; a sparse one has several such places."""
    local, parts = getattr(tensor, "_local_tensor", tensor), list[Tensor]()
    if local.layout == torch.sparse_coo:
        parts = [local._indices(), local._values()]
    elif local.layout in {torch.sparse_csr, torch.sparse_bsr}:
        parts = [local.crow_indices(), local.col_indices(), local.values()]
    elif local.layout in {torch.sparse_csc, torch.sparse_bsc}:
        parts = [local.ccol_indices(), local.row_indices(), local.values()]
    else:
        parts = [local]
    return [part.untyped_storage() for part in parts]


@final
class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts live storages while it is entered; each counts once, however many views it has.

    A storage is counted from the operation that first shows it until it is freed, so tensors
    that exist before are counted by `assign`. Of a tensor in shards this rank's own counts. About
    5 us per operation.

    Args:
        limit: bytes at which an allocation fails as a full device would; None never fails.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.limit = limit
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, Part] = {}
        self._totals: dict[Part, int] = {}
        self._live = 0
        self._peak = 0
        self._at_peak: dict[Part, int] = {}

    @property
    def estimate(self) -> MemoryEstimate:
        """The peak since the last `reset`, by part."""
        return MemoryEstimate.of(self._at_peak)

    def reset(self) -> None:
        """Begin a new peak at what is alive now."""
        self._peak = 0
        self._note_peak()

    def assign(self, part: Part, tensors: Iterable[Tensor]) -> None:
        """Say what tensors belong to, counting those not seen before.

        Raises:
            torch.OutOfMemoryError: they exceed the limit.
        """
        for tensor in tensors:
            for key in self._count(tensor):
                self._totals[self._parts[key]] -= self._sizes[key]
                self._totals[part] = self._totals.get(part, 0) + self._sizes[key]
                self._parts[key] = part
        if self._live == self._peak:
            self._note_peak()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation gives
        """Run one operation and count what it allocated.

        Raises:
            torch.OutOfMemoryError: it exceeds the limit.
        """
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # a DTensor's operations come again, on what this rank holds
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> list[int]:
        return [self._count_storage(storage) for storage in _storages(tensor)]

    def _count_storage(self, storage: torch.UntypedStorage) -> int:
        key, size = id(storage), storage.nbytes()
        if key not in self._sizes:
            # torch keeps the Python object of a storage for as long as the storage itself.
            weakref.finalize(storage, self._forget, key).atexit = False
            self._sizes[key], self._parts[key] = 0, "activations"
        grown = size - self._sizes[key]
        if grown:
            self._add(key, grown)
        return key

    def _add(self, key: int, grown: int) -> None:
        part = self._parts[key]
        self._sizes[key] += grown
        self._totals[part] = self._totals.get(part, 0) + grown
        self._live += grown
        if self.limit is not None and self._live > self.limit:
            raise torch.OutOfMemoryError(
                f"{self._live} bytes of tensors exceed the limit of {self.limit}"
            )
        if self._live > self._peak:
            self._note_peak()

    def _note_peak(self) -> None:
        self._peak, self._at_peak = self._live, dict(self._totals)

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        self._totals[self._parts.pop(key)] -= size
        self._live -= size
