"""View the memory of a tensor as integers."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """View a dense tensor as a row of integers no wider than its elements; copied if need be."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    # One element is contiguous whatever its stride, but only stride 1 takes another dtype.
    return flat.as_strided(flat.shape, (1,)).view(dtype)
