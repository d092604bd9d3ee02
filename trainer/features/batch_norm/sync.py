"""Normalise over the micro-batches that all ranks compute at the same time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.coupling import Coupling
from trainer.features.batch_norm.layers import BatchNormLayer
from trainer.features.batch_norm.mode import BatchNormMode
from trainer.features.batch_norm.modes import Pooled


@final
@dataclass(frozen=True, kw_only=True)
class Sync(BatchNormMode):
    """Micro-batches of all ranks together, as SyncBatchNorm does, on CPUs too.

    One sum over ranks in each layer's forward, and one in its backward.
    """

    accepts_cut = True

    @property
    def estimating(self) -> Pooled:
        """See the base class."""
        return Pooled()

    def coupling(self, name: str) -> Coupling:
        """See the base class."""
        return replace(super().coupling(name), joins_ranks=True)

    def normalize(self, layer: BatchNormLayer, values: Tensor) -> Tensor:
        """See the base class; on one rank, and outside of a run's steps, as `pooled`."""
        if not layer.joins_ranks:
            return layer.in_pieces(values)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        dims = [dim for dim in range(values.dim()) if dim != 1]
        count = values.numel() // values.shape[1]  # 0 where a rank only fills up
        total = wide.sum(dims)
        own_mean = total / max(1, count)
        # Around the rank's own mean, so that nothing cancels in float32.
        deviations = (wide - _beside(own_mean, wide)).square().sum(dims).double()
        total, own_mean = total.double(), own_mean.double()
        sums = torch.stack([torch.full_like(total, count), total, deviations + total * own_mean])
        layer.note_sums(sums.detach())
        summed: Tensor = _SumOverRanks.apply(sums)  # type: ignore[no-untyped-call] # untyped in torch
        counts, totals, squares = summed
        mean = totals / counts.clamp(min=1)
        variance = (squares / counts.clamp(min=1) - mean.square()).clamp(min=0)
        scale, shift = (variance + layer.eps).rsqrt().to(wide.dtype), mean.to(wide.dtype)
        found = (wide - _beside(shift, wide)) * _beside(scale, wide)
        if layer.affine:
            found = found * _beside(layer.weight, wide) + _beside(layer.bias, wide)
        return found.to(values.dtype)

    def scope(self, samples: str, ranks: int) -> str:
        """See the base class."""
        if ranks == 1:
            return f"over micro-batches of {samples} samples (sync on one rank is pooled)"
        return (
            f"over {ranks} micro-batches of {samples} samples, one of each rank (sync); running "
            "statistics over the whole step"
        )


@final
class _SumOverRanks(torch.autograd.Function):
    """Adds a tensor over ranks, and in backward its gradient. Collective.

    PyTorch's own (`torch.distributed.nn.functional.all_reduce`) is deprecated from 2.13 on.
    """

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:  # noqa: ANN401 - PyTorch's context
        """Give the sum over ranks, of the shape of `values`."""
        found = values.clone()
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        """Give the sum of the ranks' gradients: each rank's output depends on every input."""
        found = gradient.clone()
        dist.all_reduce(found)
        return found


def _beside(channels: Tensor, values: Tensor) -> Tensor:
    """View `(channels,)` so that it meets the second dimension of values."""
    return channels.view(1, -1, *[1] * (values.dim() - 2))
