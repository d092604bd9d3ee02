"""Hold all micro-batches of a step in lockstep to the same blocks in the same order.

Under FSDP2 every use of a block gathers its parameters. A model that uses its blocks as its data
ask would leave other ranks waiting, or end the process. So the first micro-batch asks before each
block whether all ranks mean the same, and a later one is compared with the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import NoReturn, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from trainer.core.errors import ConfigError
from trainer.core.world import World

END = "its end"
OBJECT = "the object itself"  # the entry of an opened object beside its attributes


@final
class BlockOrder:
    """Compares the blocks that a forward comes to, just before their parameters are gathered.

    Blocks that are recomputed in backward follow from those of the forward, and are not looked at.
    """

    def __init__(self, root: nn.Module, world: World) -> None:
        self._world = world
        self._known: list[str] | None = None
        self._seen: list[str] = []
        self._is_watching = self._is_forward = False
        for name, block in root.named_modules():
            if issubclass(type(block), FSDPModule):
                is_root = block is root
                # In front of FSDP2's own hook, which gathers.
                block.register_forward_pre_hook(partial(self._enter, name, is_root), prepend=True)
                block.register_forward_hook(partial(self._leave, name, is_root))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Watch the forward of one micro-batch. Collective in the first."""
        self._seen.clear()
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = self._is_forward = False
        if self._known is None:
            self._known = list(self._seen)

    def _enter(self, name: str, is_root: bool, *_: object) -> None:
        # A compiler sees no collective here.
        if self._is_watching and not torch.compiler.is_compiling():
            self._is_forward = self._is_forward or is_root
            if self._is_forward:
                self._check(name or "what is outside of the blocks")

    def _leave(self, name: str, is_root: bool, _: nn.Module, __: object, output: object) -> None:
        """Look at what a block returns, and at the end of all before any backward gathers."""
        if not self._is_forward or torch.compiler.is_compiling():
            return
        opened = open_object(None, (), output) or output
        if not is_dataclass(output) and not any(map(torch.is_tensor, tree_leaves(opened))):
            # FSDP2 would not notice that its backward begins, and leave its gradients out.
            raise ConfigError(
                f"model: {name or 'forward'} returns a {type(output).__name__} without tensors: "
                "return tensors, or an object with tensors as attributes, or use sync=deferred"
            )
        if is_root:
            self._check(END)
            self._is_forward = False

    def _check(self, mine: str) -> None:
        if self._known is None:
            each = self._world.collect(mine)
            for rank, name in enumerate(each):
                if name != each[0]:
                    _refuse(f"rank {rank}", name, each[0], "rank 0")
        else:
            index, expected = len(self._seen), END
            if index < len(self._known):
                expected = self._known[index]
            if mine != expected:
                _refuse("a micro-batch", mine, expected, "the first")
        self._seen.append(mine)


def open_object(_: object, __: object, output: object) -> dict[str, object] | None:
    """Show the tensors of a plain object, a forward hook before FSDP2's; None for a container."""
    if torch.is_tensor(output) or isinstance(output, dict | list | tuple) or is_dataclass(output):
        return None
    return {**getattr(output, "__dict__", {}), OBJECT: output}


def close_object(_: object, __: object, output: object) -> object:
    """Give the object back that `open_object` opened, a forward hook after FSDP2's."""
    if isinstance(output, dict) and OBJECT in output:
        return output[OBJECT]
    # PyTorch takes None from a hook for the output as it is.
    return None


def _refuse(who: str, mine: str, theirs: str, others: str) -> NoReturn:
    raise ConfigError(
        f"sync: {who} reaches {mine} where {others} reaches {theirs}: a model that skips or "
        "repeats blocks depending on its input needs sync=deferred"
    )
