"""What an objective is: named loss sums over named, data-only weights. It never divides.

The step's loss is `sum_k S_k / D_k`: `S_k` the sum of term `k` over the whole global batch, `D_k`
its denominator, also over the whole global batch and all ranks, known before the first backward.
A coefficient belongs into the sum. Metrics are sums over weights in the same way, so evaluation
is exact for every split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.micro_batch import Fields
from trainer.out_of_memory import is_out_of_memory

ModelCall = Callable[[Fields], Any]
"""Calls the model with those fields its `forward` names; gives what the model gives."""

_OF_OPERANDS = {IndexError, TypeError, ValueError, RuntimeError}
"""What PyTorch raises where shapes, types or values do not belong together."""

IGNORED = -100
"""The label of what is no loss term, as everywhere in PyTorch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What one micro-batch adds to the step.

    Attributes:
        losses: named 0-d sums with a graph.
        metrics: named 0-d sums without one. Evaluation alone reads them, under `no_grad`: while
            gradients are recorded they may be left out, and the built-in objectives do.
    """

    losses: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """Turns a model and a micro-batch into named sums, and a micro-batch into named weights."""

    scope: Literal["sample", "embedding"] = "sample"
    """`sample`: a sum over samples. `embedding`: samples are coupled (contrastive)."""

    group_size: int = 1
    """Within `sample`: samples that may be coupled, since no cut divides them. That many
    consecutive samples of a step form a group, in the order in which the step takes them, the
    last of which may be short; a micro-batch holds whole groups, one after the other."""

    @abstractmethod
    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count what each loss and metric is divided by, from the data alone.

        Returns:
            A weight for every name that `sums` gives.
        """

    @abstractmethod
    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Run the model on one micro-batch and sum, dividing by nothing."""


def logits_of(output: Any) -> Tensor:  # noqa: ANN401 - models return what they like
    """Take the logits out of a model's output: the output itself or its `.logits`.

    Raises:
        ConfigError: the model gives something else, such as a loss it computed itself.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim > 1:
        return logits
    if isinstance(output, Tensor):
        given = f"a tensor of shape {tuple(output.shape)}"
    else:
        given = f"a {type(output).__name__} without logits"
    raise ConfigError(
        f"model: forward returned {given}; return logits, or an object with .logits, and leave "
        "the loss to the objective, which sums it so that every split gives the same step"
    )


def labels_of(fields: Fields) -> Tensor:
    """Take the labels out of a micro-batch.

    Raises:
        ConfigError: the data give none.
    """
    if "labels" not in fields:
        raise ConfigError(
            f"objective: the data give no field named labels (they give: {', '.join(fields)})"
        )
    return fields["labels"]


def sequences_of(fields: Fields, name: str) -> Tensor:
    """Take labels that are one sequence per sample, `(batch, time)`, out of a micro-batch.

    Args:
        fields: of the micro-batch.
        name: of the objective, for the message.

    Raises:
        ConfigError: the data give none, or labels of another shape.
    """
    labels = labels_of(fields)
    if labels.ndim == 1:
        raise ConfigError(
            f"objective={name}: labels are one number per sample, not a sequence; type "
            "objective=classify"
        )
    if labels.ndim != 2:  # noqa: PLR2004 - (batch, time)
        raise ConfigError(
            f"objective={name}: labels of shape {tuple(labels.shape)} are no sequences of tokens, "
            "(batch, time)"
        )
    return labels


@contextmanager
def shapes_named(name: str, logits: Tensor, labels: Tensor) -> Iterator[None]:
    """Say with which shapes an objective failed that computes on what the user's own code gave.

    Args:
        name: of the objective.
        logits: as the model gave them.
        labels: as the data did.

    Yields:
        Nothing.

    Raises:
        ConfigError: what PyTorch says is wrong, and the shapes.
        Exception: as raised inside, where it is the machinery's own.
    """
    try:
        yield
    except Exception as error:
        # Subclasses tell of memory, fake tensors or other ranks.
        if type(error) not in _OF_OPERANDS or is_out_of_memory(error):
            raise
        cause = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise ConfigError(
            f"objective={name}: {cause:.120}; logits of shape {tuple(logits.shape)} and "
            f"{logits.dtype}, labels of shape {tuple(labels.shape)} and {labels.dtype}"
        ) from error


def without_labels(fields: Fields) -> Fields:
    """Take the labels away, so that a model that could computes no loss of its own."""
    return {name: value for name, value in fields.items() if name != "labels"}


def at_least_single(logits: Tensor) -> Tensor:
    """Widen half precision to float32; wider logits are returned as they are, uncopied."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_smoothing(label_smoothing: object) -> None:
    """Refuse a smoothing that leaves nothing of the target.

    Raises:
        ConfigError: naming the value.
    """
    if not (isinstance(label_smoothing, int | float) and 0.0 <= label_smoothing < 1.0):
        raise ConfigError(f"objective.label_smoothing: {label_smoothing!r} is not in [0, 1)")


def check_coefficient(key: str, value: object) -> None:
    """Refuse what cannot weigh a term.

    Raises:
        ConfigError: naming the key and the value.
    """
    if not (isinstance(value, int | float) and 0.0 <= value < float("inf")):
        raise ConfigError(f"{key}: {value!r} is not a coefficient (0 or more)")
