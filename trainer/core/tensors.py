"""Tell whether a tensor is sharded, and view its memory as integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:  # the import costs half a second, which a run without shards need not wait for
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is one rank's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def bits_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """View a dense tensor as a row of integers no wider than its elements; copied if need be."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    # One element is contiguous whatever its stride, but only stride 1 takes another dtype.
    return flat.as_strided(flat.shape, (1,)).view(dtype)
