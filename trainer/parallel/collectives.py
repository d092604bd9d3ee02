"""The collectives of a sharded micro-batch, which a rank without memory sends all the same.

In lockstep every forward and backward of FSDP2 gathers parameters and scatters gradients. A rank
whose allocation fails in between leaves the others waiting in the next of them. Every micro-batch
sends the same sequence, so what one has sent says what is outstanding in another.

A model that uses its blocks as its data ask would leave them waiting, too, or end the process. So
the first micro-batch asks before each collective whether all ranks mean the same, and a later one
that leaves its sequence is refused before it sends anything.

A gather and a scatter are heard of just before they are sent, when their buffers are allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from trainer.core.errors import ConfigError
from trainer.core.world import World


@final
@dataclass(frozen=True)
class _Gather:
    """The parameters of a group come to every rank."""

    name: str
    group: FSDPModule

    def send(self, *, across: dist.ProcessGroup | None) -> None:
        """Send this rank's own shards: the others compute with what they receive."""
        self.group.unshard()
        self.group.reshard()


@final
@dataclass(frozen=True)
class _Scatter:
    """The gradients of a group are summed, and each rank keeps its shard of the sum."""

    name: str
    sizes: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    ranks: Any
    op: Any

    def send(self, *, across: dist.ProcessGroup | None) -> None:
        """Send zeros."""
        given, kept = (torch.zeros(n, dtype=self.dtype, device=self.device) for n in self.sizes)
        dist.reduce_scatter_single(kept, given, group=self.ranks, op=self.op)
        if across is not None:
            dist.all_reduce(kept, group=across)


@final
class Collectives:
    """Remembers what micro-batches send, holds all of them to it, and sends the rest of one.

    Args:
        groups: units that are gathered and reduced each on its own, by name.
        across: the ranks that hold the same shard of other copies (HSDP); None without copies.
        world: all ranks.
    """

    def __init__(
        self, groups: Mapping[str, FSDPModule], across: dist.ProcessGroup | None, world: World
    ) -> None:
        self._across = across
        self._world = world
        self._known: list[_Gather | _Scatter] | None = None
        self._sent: list[_Gather | _Scatter] = []
        self._is_listening = False
        for name, group in groups.items():
            group.set_custom_all_gather(_Gathering(self, name, group))
            group.set_custom_reduce_scatter(_Scattering(self, name))

    def note(self, collective: _Gather | _Scatter) -> None:
        """Hear of one, just before it is sent.

        Raises:
            ConfigError: it is not what the other ranks, or micro-batches, send.
        """
        if self._is_listening:
            self._check(collective)
            self._sent.append(collective)

    def forget(self) -> None:
        """Begin a step."""
        self._sent.clear()

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Listen to what a micro-batch sends; one that fails may be ended in a second block.

        Yields:
            Nothing.

        Raises:
            ConfigError: it is not what the other ranks, or micro-batches, send.
        """
        self._is_listening = True
        try:
            yield
            self._check(None)
        finally:
            self._is_listening = False
        if self._known is None:
            self._known = list(self._sent)
        self._sent.clear()

    def send_rest(self, *, across: bool) -> None:
        """Send what a micro-batch would still have sent. Collective.

        Args:
            across: whether gradients are reduced over the copies, too.
        """
        assert self._known is not None
        self._is_listening = False
        for collective in self._known[len(self._sent) :]:
            collective.send(across=self._across if across else None)
        self._sent[:] = self._known

    def _check(self, mine: _Gather | _Scatter | None) -> None:
        """Compare what comes next, None at the end. Collective in the first micro-batch alone.

        Raises:
            ConfigError: it is something else than elsewhere.
        """
        if self._known is None:
            # What does not wait longer than `parallel.timeout_s` comes first.
            if not self._world.is_same(repr(_described(mine))):
                told = self._world.collect(_described(mine))
                other = next(rank for rank, each in enumerate(told) if each != told[0])
                _refuse(f"rank {other}", told[other], told[0], "rank 0")
            return
        num_sent = len(self._sent)
        expected = self._known[num_sent] if num_sent < len(self._known) else None
        if mine != expected:
            _refuse("a micro-batch", _described(mine), _described(expected), "the first")


def _described(collective: _Gather | _Scatter | None) -> list[str]:
    """Give the kind of a collective, and the name of what it moves."""
    if collective is None:
        return ["", "its end"]
    return [type(collective).__name__, collective.name or "what is outside of the blocks"]


def _refuse(who: str, mine: Sequence[str], theirs: Sequence[str], others: str) -> NoReturn:
    """Name the block that one micro-batch uses otherwise than another.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"sync: {who} comes to {mine[1]} where {others} comes to {theirs[1]}: with a reduction in "
        "every micro-batch all must use the same blocks of the model, in the same order and as "
        "often; one that skips or repeats a block as its data ask needs sync=deferred"
    )


class _Gathering(DefaultAllGather):
    def __init__(self, collectives: Collectives, name: str, group: FSDPModule) -> None:
        self._collectives, self._gather = collectives, _Gather(name, group)

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:  # noqa: ANN401 - passed on
        self._collectives.note(self._gather)
        return super().__call__(*args, **kwargs)


class _Scattering(DefaultReduceScatter):
    def __init__(self, collectives: Collectives, name: str) -> None:
        self._collectives, self._name = collectives, name

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - PyTorch's own union
        async_op: bool = False,
    ) -> dist.Work:
        sizes = input_tensor.numel(), output_tensor.numel()
        given = sizes, input_tensor.dtype, input_tensor.device, group, op
        self._collectives.note(_Scatter(self._name, *given))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
