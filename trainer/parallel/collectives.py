"""The collectives of a sharded micro-batch, which a rank without memory sends all the same.

In lockstep every forward and backward of FSDP2 gathers parameters and scatters gradients. A rank
whose allocation fails in between leaves the others waiting in the next of them. Every micro-batch
sends the same sequence, so what one has sent says what is outstanding in another.

A gather and a scatter are heard of just before they are sent, when their buffers are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from trainer.errors import DoesNotFitError


@final
@dataclass(frozen=True)
class _Gather:
    """The parameters of a group come to every rank."""

    group: FSDPModule

    def send(self, *, across: dist.ProcessGroup | None) -> None:
        """Send this rank's own shards: the others compute with what they receive."""
        self.group.unshard()
        self.group.reshard()


@final
@dataclass(frozen=True)
class _Scatter:
    """The gradients of a group are summed, and each rank keeps its shard of the sum."""

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
    """Remembers what micro-batches send, and sends the rest of one.

    Args:
        groups: units that are gathered and reduced each on its own.
        across: the ranks that hold the same shard of other copies (HSDP); None without copies.
    """

    def __init__(self, groups: Sequence[FSDPModule], across: dist.ProcessGroup | None) -> None:
        self._across = across
        self._known: list[_Gather | _Scatter] | None = None
        self._is_regular = True
        self._sent: list[_Gather | _Scatter] = []
        self._is_standing_in = False
        for group in groups:
            group.set_custom_all_gather(_Gathering(self, group))
            group.set_custom_reduce_scatter(_Scattering(self))

    def note(self, collective: _Gather | _Scatter) -> None:
        """Hear of one, just before it is sent."""
        if not self._is_standing_in:
            self._sent.append(collective)

    def forget(self) -> None:
        """Begin a step."""
        self._sent.clear()

    def complete(self) -> None:
        """End a micro-batch."""
        if self._known is None:
            self._known = list(self._sent)
        self._is_regular &= self._known == self._sent
        self._sent.clear()

    def send_rest(self, *, across: bool) -> None:
        """Send what a micro-batch would still have sent. Collective.

        Args:
            across: whether gradients are reduced over the copies, too.

        Raises:
            DoesNotFitError: what that is cannot be told.
        """
        known, num_sent = self._known or [], len(self._sent)
        if not self._is_regular or self._sent != known[:num_sent]:
            raise DoesNotFitError(
                "out of memory in a micro-batch that reduces its own gradients, and no two send "
                "the same, so the other ranks cannot be joined: lower accum.max_tokens or "
                "accum.micro, or use sync=deferred"
            )
        self._is_standing_in = True
        try:
            for collective in known[num_sent:]:
                collective.send(across=self._across if across else None)
        finally:
            self._is_standing_in = False
        self._sent[:] = known


class _Gathering(DefaultAllGather):
    def __init__(self, collectives: Collectives, group: FSDPModule) -> None:
        self._collectives, self._gather = collectives, _Gather(group)

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:  # noqa: ANN401 - passed on
        self._collectives.note(self._gather)
        return super().__call__(*args, **kwargs)


class _Scattering(DefaultReduceScatter):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - PyTorch's own union
        async_op: bool = False,
    ) -> dist.Work:
        sizes = input_tensor.numel(), output_tensor.numel()
        self._collectives.note(_Scatter(sizes, input_tensor.dtype, input_tensor.device, group, op))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
