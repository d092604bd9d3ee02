"""Count loss terms by the field `weight` of the data, in a sum and in its divisor by one rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import WEIGHT


def weight_of(fields: Fields, labels: Tensor) -> Tensor | None:
    """Give how often each label counts, in the shape of the labels; None where each does once."""
    if (given := fields.get(WEIGHT)) is None:
        return None
    if given.numel() == len(labels):
        given = given.reshape(len(labels), *[1] * (labels.dim() - 1))
    elif given.shape != labels.shape:
        raise ConfigError(
            f"objective: weights of shape {tuple(given.shape)} do not match labels of shape "
            f"{tuple(labels.shape)}: give a number for each sample, or one for each label"
        )
    return given.expand(labels.shape)


def count_of(labels: Tensor, weight: Tensor | None) -> float:
    """Count the labels that are loss terms, each as often as its weight says."""
    is_term = labels != IGNORED
    if weight is None:
        return float(torch.count_nonzero(is_term))
    return float((weight.double() * is_term).sum())


def weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply values, one for each label, by how often each counts; what counts is float64."""
    if weight is None:
        return values
    dtype = values.dtype if values.is_floating_point() else torch.float64
    return values * weight.to(torch.promote_types(dtype, torch.float32))


def summed_entropy(logits: Tensor, labels: Tensor, often: Tensor | None, **how: Any) -> Tensor:  # noqa: ANN401 - as `cross_entropy` takes them
    """Sum the cross entropy of labels, each as often as it counts; -100 is no term."""
    reduction = "sum" if often is None else "none"
    entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction, **how)
    return weighted(entropy, often).sum()
