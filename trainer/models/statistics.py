"""Which part of a model makes the cut a part of what is computed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_statistics(model: nn.Module) -> str | None:
    """Name the first BatchNorm that normalises within each micro-batch, as it is set now.

    One that is kept in evaluation mode does not: it normalises with its running statistics.
    """
    parts: Iterator[tuple[str, nn.Module]] = model.named_modules()
    norms = ((name, part) for name, part in parts if isinstance(part, _BatchNorm))
    found = (name for name, norm in norms if norm.training or norm.running_mean is None)
    return next(found, None)
