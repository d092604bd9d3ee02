"""Tell the collectives of FSDP2 from computing, which they lie inside of, where the host waits.

On an accelerator they travel on streams of their own, and nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer.core.phases import PhaseTimes
from trainer.core.rank_progress import Phase
from trainer.parallel.base import all_gather, reduce_scatter

OF_STEPS: tuple[Phase, ...] = ("gather", "compute", "reduce")
"""Phases in which gradients are computed and reduced."""


def time_collectives(
    groups: Sequence[FSDPModule], times: PhaseTimes, goes_on: Callable[[], bool]
) -> None:
    """Time all collectives of some groups.

    Args:
        groups: units that are gathered and reduced each on its own.
        times: of this rank.
        goes_on: whether a reduce-scatter is followed by an all-reduce over copies of the model.
    """
    for group in groups:
        flight = _Flight(times)
        group.set_custom_all_gather(_TimedGather(flight))  # type: ignore[arg-type] # a protocol
        group.set_custom_reduce_scatter(_TimedScatter(flight, goes_on))  # type: ignore[arg-type]
        # FSDP2 calls it when the copies have met, and leaves the all-reduce itself to nobody.
        group.set_all_reduce_hook(flight.land)


@final
class _Flight:
    """One collective at a time, or two in a row, for which the host does nothing but wait."""

    def __init__(self, times: PhaseTimes) -> None:
        self._times = times
        self._since: tuple[Phase, Any] | None = None

    def launch(self) -> None:
        """Begin to wait; what travels beside the steps, for an evaluation, is a part of that."""
        if self._times.phase in OF_STEPS:
            self._since = self._times.enter("reduce"), self._times.mark()

    def land(self, _: Tensor | None = None) -> None:
        """Go on with what was done before."""
        if self._since is not None:
            phase, launched = self._since
            self._since = None
            self._times.flew(launched, launched)
            self._times.enter(phase)


class _Allocating:
    """Allocates as FSDP2 does by default."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _TimedGather(_Allocating):
    def __init__(self, flight: _Flight) -> None:
        self._flight = flight

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401 - PyTorch does not say
        self._flight.launch()
        work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._flight.land()
        return work


@final
class _TimedScatter(_Allocating):
    def __init__(self, flight: _Flight, goes_on: Callable[[], bool]) -> None:
        self._flight, self._goes_on = flight, goes_on

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - PyTorch's own union
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401 - PyTorch does not say
        self._flight.launch()
        work = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if not self._goes_on():
            self._flight.land()
        return work
