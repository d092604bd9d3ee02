"""Numbers that are written in place, in tensors and arrays: what can be told of them, and kept."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from trainer.bits import bits_of

Values = Tensor | np.ndarray[Any, Any]
"""What has numbers that are written in place."""

MARKED = 2**20
"""Numbers of a tensor on a device that are marked at once."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def is_out_of_reach(it: Values) -> bool:
    """Whether nothing can be told of a value here.

    A shard is its mechanism's, which forgets what a forward writes into the gathered whole. What a
    forward computed and left behind is a reference. In a rehearsal on fake tensors no real one can
    be computed with.
    """
    if not isinstance(it, Tensor):
        return False
    if isinstance(it, DTensor) or it.is_meta or not it.is_leaf:
        return True
    return (
        not isinstance(it, FakeTensor)
        and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
    )


def is_copyable(it: Values) -> bool:
    """Whether copying a value keeps it, and none but a forward writes into it."""
    if not isinstance(it, Tensor):
        return True
    return not it.requires_grad and it.layout == torch.strided and not it.is_quantized


def is_watched(value: Any) -> bool:  # noqa: ANN401 - any attribute
    """Whether a value is a tensor that only a forward can have written."""
    return isinstance(value, Tensor) and not is_out_of_reach(value) and is_copyable(value)


def version_of(it: Values) -> int:
    """Give PyTorch's count of writes; NumPy has none."""
    return 0 if not isinstance(it, Tensor) or it.is_inference() else it._version


def write(it: Values, copy: Values) -> None:
    """Put numbers back in place."""
    if not isinstance(it, Tensor):
        np.copyto(it, copy)
        return
    assert isinstance(copy, Tensor)
    with torch.inference_mode(it.is_inference()), torch.no_grad():
        if it.shape == copy.shape:
            it.copy_(copy)
        else:  # through `.data`, which may change it
            it.data = copy.clone()


def _bits(tensor: Tensor) -> Tensor:
    """View the numbers as integers: none of them is NaN."""
    return bits_of(tensor, _WORDS.get(tensor.element_size(), torch.int64))


def is_same(it: Values, copy: Values) -> bool:
    """Compare bit for bit. A fake tensor has no bits, and nothing to hide."""
    if it.shape != copy.shape or it.dtype != copy.dtype:
        return False
    if isinstance(it, Tensor) and isinstance(copy, Tensor):
        return isinstance(it, FakeTensor) or torch.equal(_bits(it), _bits(copy))
    return it.tobytes() == copy.tobytes()  # type: ignore[union-attr] # arrays


def mark_of(it: Values) -> int:
    """Reduce numbers to one, by their bits and their order."""
    if isinstance(it, FakeTensor):
        return 0
    if not isinstance(it, Tensor):
        return zlib.crc32(it.tobytes())
    bits = _bits(it)
    if bits.device.type == "cpu":
        return zlib.crc32(bits.view(torch.uint8).numpy().data)
    weights = torch.arange(1, 2 * MARKED, 2, device=bits.device)
    sums = [(piece.long() * weights[: len(piece)]).sum() for piece in torch.split(bits, MARKED)]
    return hash(tuple(torch.stack(sums).tolist())) if sums else 0
