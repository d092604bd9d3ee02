"""The unit of work: samples that share one forward and backward on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

Fields = Mapping[str, Tensor]
"""A collated micro-batch: tensors by name, first dimension the samples."""

IGNORED = -100
"""The label of what is no loss term, which PyTorch's cross entropy leaves out by default."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that share one forward and backward."""

    fields: Fields  # collated tensors by name
    ids: tuple[int, ...]  # of its samples in the training set
    positions: tuple[int, ...]  # of its samples in the global batch
    weights: Mapping[str, float]  # named data-only denominators, each a Python float
    num_tokens: int  # real input positions
    num_positions: int  # computed positions, padding counted
    rng_key: int  # seed of every random draw of its forward


def to_device(fields: Fields, device: torch.device) -> Fields:
    """Move collated fields without waiting; on a CPU they are the same."""
    return {name: field.to(device, non_blocking=True) for name, field in fields.items()}


def output_part(output: Any, name: str) -> Any:  # noqa: ANN401 - models return what they like
    """Take a part of a model's output, an entry of a mapping or an attribute; None without it."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
