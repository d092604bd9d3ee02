"""Normalise over groups of samples, over micro-batches of a rank or of all, or by what stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.assemble.features import StepShape
from trainer.config.components import GroupSize
from trainer.core.coupling import NONE, Coupling
from trainer.core.errors import ConfigError
from trainer.features.batch_norm.layers import BatchNormLayer
from trainer.features.batch_norm.mode import DEFAULT_GROUP, BatchNormMode


@dataclass(frozen=True, kw_only=True)
class Ghost(BatchNormMode):
    """Groups of consecutive samples of the global batch, which every cut leaves whole.

    "Ghost batch normalisation" (Hoffer et al. 2017), tied to samples in place of micro-batches.
    """

    group: GroupSize = DEFAULT_GROUP  # the last group of a global batch may be short

    def resolved(self, shape: StepShape) -> BatchNormMode:
        """See the base class."""
        group, most = self.group, shape.largest
        if shape.is_padded:
            raise ConfigError(
                "batchnorm=ghost: samples have different lengths, and BatchNorm counts padded "
                "positions, of which each cut has others: type accum=fixed accum.micro=N "
                "batchnorm=micro, or batchnorm=frozen"
            )
        if group > most:
            remedy = f"type batchnorm.group={most}" if most > 1 else "type batchnorm=frozen"
            raise ConfigError(
                f"batchnorm.group={group}: no global batch of {most} fills a group: {remedy}"
            )
        return self

    @property
    def estimating(self) -> Ghost:
        """See the base class."""
        return self

    def coupling(self, name: str) -> Coupling:
        """See the base class."""
        why = f"batchnorm=ghost normalises over groups of {self.group} samples ({name})"
        remedy = "batchnorm.group=N"
        return Coupling("group", self.group, why=why, key="batchnorm", remedy=remedy)

    def normalize(self, layer: BatchNormLayer, values: Tensor) -> Tensor:
        """See the base class."""
        rows = layer.rows_of(self.group, values)
        return layer.in_pieces(values, rows)

    def scope(self, samples: str, ranks: int) -> str:
        """See the base class."""
        return f"over groups of {self.group} samples, whatever the cut"


@final
@dataclass(frozen=True, kw_only=True)
class Pooled(BatchNormMode):
    """Each micro-batch over itself; the whole step moves the running statistics once."""

    accepts_cut = True

    @property
    def estimating(self) -> Pooled:
        """See the base class."""
        return self

    def normalize(self, layer: BatchNormLayer, values: Tensor) -> Tensor:
        """See the base class."""
        return layer.in_pieces(values)

    def scope(self, samples: str, ranks: int) -> str:
        """See the base class."""
        text = f"over micro-batches of {samples} samples"
        return f"{text}; running statistics over the whole step"


@final
@dataclass(frozen=True, kw_only=True)
class Micro(BatchNormMode):
    """PyTorch's own: each micro-batch over itself, and each moves the running statistics."""

    accepts_cut = True
    # It also accepts modules of one's own that couple a micro-batch.
    needs_layers = False
    moves_once = False

    @property
    def estimating(self) -> Pooled:
        """See the base class."""
        return Pooled()

    def normalize(self, layer: BatchNormLayer, values: Tensor) -> Tensor:
        """See the base class."""
        return _BatchNorm.forward(layer, values)

    def scope(self, samples: str, ranks: int) -> str:
        """See the base class."""
        whose = ", those of rank 0" * (ranks > 1)
        text = f"over micro-batches of {samples} samples"
        return f"{text}; each moves the running statistics{whose}"


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
        if layer.sum_over_ranks is None:
            return layer.in_pieces(values)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        dims = [dim for dim in range(values.dim()) if dim != 1]
        # It is 0 where a rank only fills up.
        count = values.numel() // values.shape[1]
        total = wide.sum(dims)
        own_mean = total / max(1, count)
        # Around the rank's own mean, so that nothing cancels in float32.
        deviations = (wide - _beside(own_mean, wide)).square().sum(dims).double()
        total, own_mean = total.double(), own_mean.double()
        sums = torch.stack([torch.full_like(total, count), total, deviations + total * own_mean])
        layer.note_sums(sums.detach())
        summed: Tensor = _SumOverRanks.apply(sums, layer.sum_over_ranks)  # type: ignore[no-untyped-call] # untyped in torch
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
            return f"over micro-batches of {samples} samples; on one rank as batchnorm=pooled"
        return (
            f"over {ranks} micro-batches of {samples} samples, one a rank; running "
            "statistics over the whole step"
        )


@final
@dataclass(frozen=True, kw_only=True)
class Frozen(BatchNormMode):
    """The running statistics as they were loaded; weights and biases of the layers are trained."""

    def coupling(self, name: str) -> Coupling:
        """See the base class."""
        return NONE

    def normalize(self, layer: BatchNormLayer, values: Tensor) -> Tensor:
        """See the base class."""
        how = (layer.running_mean, layer.running_var, False, 0.0, layer.eps)
        cudnn = torch.backends.cudnn.enabled
        return torch.batch_norm(values, layer.weight, layer.bias, *how, cudnn)

    def scope(self, samples: str, ranks: int) -> str:
        """See the base class."""
        return "by the running statistics as they are, whatever the cut"


@final
@dataclass(frozen=True, kw_only=True)
class Auto(Ghost):
    """`ghost` under a cut that chooses its sizes, where no sample is padded; else `micro`."""

    needs_layers = False

    def resolved(self, shape: StepShape) -> BatchNormMode:
        """See the base class; a group that nobody typed is no larger than the global batch."""
        if shape.is_stated or shape.is_padded:
            return Micro(precise=self.precise)
        group = self.group
        if group == DEFAULT_GROUP:
            group = min(group, max(2, shape.largest))
        return Ghost(group=group, precise=self.precise).resolved(shape)


@final
class _SumOverRanks(torch.autograd.Function):
    """Adds a tensor over ranks, and in backward its gradient. Collective.

    PyTorch's own (`torch.distributed.nn.functional.all_reduce`) is deprecated from 2.13 on.
    """

    @staticmethod
    def forward(context: Any, values: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401
        """Give the sum over ranks, of the shape of `values`; `add` adds in place."""
        context.add = add
        return add(values.clone())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Give the sum of the ranks' gradients: each rank's output depends on every input."""
        return context.add(gradient.clone()), None


def _beside(channels: Tensor, values: Tensor) -> Tensor:
    """View `(channels,)` so that it meets the second dimension of values."""
    return channels.view(1, -1, *[1] * (values.dim() - 2))
