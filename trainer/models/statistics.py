"""Find the part of a model that makes the cut matter, and put back what forwards write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_statistics(model: nn.Module) -> str | None:
    """Name the first BatchNorm that normalises within each micro-batch, as it is set now.

    One that is kept in evaluation mode does not: it normalises with its running statistics.
    """
    parts: Iterator[tuple[str, nn.Module]] = model.named_modules()
    for name, part in parts:
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
            return name
    return None


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Put back what the block writes into buffers: the mean of no samples is not a number."""
    owners = [part._buffers for part in model.modules()]
    entries = [(o, n, b, b.clone()) for o in owners for n, b in o.items() if b is not None]
    yield
    with torch.no_grad():
        for owner, name, buffer, copy in entries:
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)
            owner[name] = buffer
