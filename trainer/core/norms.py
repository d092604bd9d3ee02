"""Know the normalisation layers of PyTorch, and which of them couple the samples they see."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainer.core.coupling import NONE, Coupling, strictest

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Layers whose parameters scale and shift what was normalised."""


def is_batch_norm(part: nn.Module) -> bool:
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


def model_coupling(model: nn.Module) -> Coupling:
    """Find the strictest coupling of samples in a model: a module's `coupling`, or BatchNorm's.

    A module may declare it by an attribute `coupling`, a `Coupling`.
    """
    found = NONE
    for name, part in model.named_modules():
        declared = getattr(part, "coupling", None)
        if isinstance(declared, Coupling):
            found = strictest(found, declared)
        elif normalizes_batch(part):
            found = strictest(found, batch_norm_coupling(name))
    return found


def batch_norm_coupling(name: str) -> Coupling:
    """Say that the layer of a name normalises each micro-batch over itself."""
    return Coupling(
        "micro_batch",
        why=f"{name} is BatchNorm, which normalises within each micro-batch",
        key="model",
        remedy="use GroupNorm",
        accepts=" batchnorm=micro",
    )
