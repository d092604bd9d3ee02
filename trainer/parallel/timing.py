"""Tells the collectives of FSDP2 from computing, which they lie inside of, where the host waits.

On an accelerator they travel on streams of their own, and nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer.core.phases import PhaseTimes
from trainer.core.rank_progress import Phase

OF_STEPS: tuple[Phase, ...] = ("gather", "compute", "reduce")
"""Phases in which gradients are computed and reduced."""


def time_collectives(
    groups: Sequence[FSDPModule], times: PhaseTimes, goes_on: Callable[[], bool]
) -> None:
    """Time all collectives of some groups; to be called again when those are exchanged.

    Args:
        groups: units that are gathered and reduced each on its own.
        times: of this rank.
        goes_on: whether a reduce-scatter is followed by an all-reduce over copies of the model.
    """
    for group in groups:
        flight = _Flight(times)
        for held in group._get_fsdp_state()._fsdp_param_groups:
            for name, more in (("_all_gather_comm", _never), ("_reduce_scatter_comm", goes_on)):
                setattr(held, name, _Timed(getattr(held, name), flight, more))
            # FSDP2 calls it when the copies have met, and leaves the all-reduce itself to nobody.
            held._all_reduce_hook = flight.land


def _never() -> bool:
    return False


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


@final
@dataclass(frozen=True)
class _Timed:
    """A collective of FSDP2, timed."""

    inner: Any
    flight: _Flight
    goes_on: Callable[[], bool]

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - PyTorch's
        memory: Tensor = self.inner.allocate(*args, **kwargs)
        return memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's
        self.flight.launch()
        work = self.inner(*args, **kwargs)
        if not self.goes_on():
            self.flight.land()
        return work
