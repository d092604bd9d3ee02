"""Count where the host looks at a tensor of the device, or makes one out of its own numbers.

On a GPU each of them waits for all kernels before it. On a CPU tensors have no place of their own,
so what `torch.tensor` made without a `torch.device` counts as the host's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.lib.support import Bench
from trainer.training.step import train_step

LOOKS = {
    *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
    *(Tensor.__index__, Tensor.cpu, Tensor.numpy, Tensor.__contains__, Tensor.__iter__),
    *(torch.nonzero, Tensor.nonzero, torch.equal, Tensor.equal, torch.allclose, torch.unique),
    *(torch.masked_select, Tensor.masked_select),
}


class Looks(TorchFunctionMode):
    """Lists the functions that waited."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._hosts: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOOKS and not any(args[0] is each for each in self._hosts):
            self.found.append(func.__name__)
        result = func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor):
            if kwargs.get("device") in (None, "cpu"):
                self._hosts.append(result)
            else:
                self.found.append("tensor")
        return result


def looks_of_a_step(bench: Bench) -> list[str]:
    """Take two steps, and list what waited in the second: the first makes what stays."""
    with Looks() as looks:
        bench.step()
        batch = bench.feed.next()
        looks.found.clear()
        train_step(bench.context, batch, bench.feed)
    return looks.found
