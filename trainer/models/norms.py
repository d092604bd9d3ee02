"""Know the normalisation layers of PyTorch, and which of them couple the samples they see."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainer.core.coupling import Coupling

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Layers whose parameters scale and shift what was normalised."""


NORMALISES = (
    "normalises over the samples of its micro-batch: type batchnorm=ghost batchnorm.group=N, where "
    "accum.micro is a multiple of N, or batchnorm=frozen, use GroupNorm or LayerNorm, or one "
    "micro-batch per step"
)
"""What `train verify` says of a layer that does."""


def has_running_statistics(part: nn.Module) -> bool:
    """Whether a layer keeps running statistics over samples, in whatever mode it is."""
    return isinstance(part, _BatchNorm)


def has_running_norm(model: nn.Module) -> bool:
    """Whether a model has BatchNorm or InstanceNorm, which take no mixed dtypes."""
    return any(isinstance(part, _NormBase) for part in model.modules())


def normalizes_batch(part: nn.Module) -> bool:
    """Whether a layer normalises over the samples of its micro-batch, as it is set now.

    BatchNorm in evaluation mode does not: it normalises with its running statistics. Nor does one
    that declares another coupling.
    """
    declared = getattr(part, "coupling", None)
    if isinstance(part, _BatchNorm) and isinstance(declared, Coupling):
        return part.training and declared.fixes_cut
    return isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
