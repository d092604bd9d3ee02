"""Predict numbers, or which of several labels apply: labels that are no single class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.samples import LabelKind
from trainer.objectives.base import (
    ModelCall,
    Objective,
    Sums,
    at_least_single,
    given_labels,
    logits_from,
    logits_of,
)
from trainer.objectives.metrics import statistics_of
from trainer.objectives.text_output import TextOutput
from trainer.objectives.weighting import count_of, weight_of, weighted

_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "squared_error": F.mse_loss,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True, kw_only=True)
class Numbers(Objective):
    """Squared error, or binary cross entropy in nats, of each number of a sample.

    The labels are `(batch,)` or `(batch, numbers)`, in any dtype; one of -100 is no loss term. The
    loss is divided by the count of numbers, as PyTorch has it.
    """

    sums_samples = True

    loss: Literal["squared_error", "binary_cross_entropy"] = "squared_error"

    @property
    def label_kind(self) -> LabelKind:
        """See the base class."""
        return "numbers" if self.loss == "squared_error" else "flags"

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the labels."""
        labels = _labels(fields)
        return {self.loss: count_of(labels, weight_of(fields, labels))}

    def predictions(self, output: Any, fields: Fields) -> Sequence[tuple[Any, Any]]:  # noqa: ANN401
        """Give the numbers; under binary cross entropy the probabilities of the labels."""
        found = at_least_single(logits_of(output))
        if self.loss == "binary_cross_entropy":
            found = found.sigmoid()
        return [*zip(_labels(fields).tolist(), found.tolist(), strict=True)]

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the numbers; under binary cross entropy the labels that are likelier than not."""
        logits, found = at_least_single(logits_from(model, fields)), list[dict[str, Any]]()
        if self.loss == "binary_cross_entropy":
            for each in logits:
                likely = (each > 0).nonzero().flatten().tolist()
                found.append({"prediction": likely, "probabilities": each.sigmoid().tolist()})
            return found
        # One number stands alone.
        if logits.shape[-1] == 1:
            logits = logits.squeeze(-1)
        return [{"prediction": numbers} for numbers in logits.tolist()]

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over the batch, in float32 at least.

        Raises:
            ConfigError: the logits are not `(batch, numbers)`, one for each label.
        """
        labels = _labels(fields)
        logits = at_least_single(logits_from(model, fields))
        if logits.shape != labels.shape:
            raise ConfigError(
                f"model: logits of shape {tuple(logits.shape)} do not match labels of shape "
                f"{tuple(labels.shape)}: one number for each is needed (model.num_classes)"
            )
        weight, labels = weight_of(fields, labels), labels.to(logits.dtype)
        # One by one, since a label of -100 is no term and is taken out of the sum.
        terms = _LOSSES[self.loss](logits, labels, reduction="none")
        return Sums(
            losses={self.loss: weighted(terms, weight).masked_fill(labels == IGNORED, 0.0).sum()},
            statistics=statistics_of(self, logits, labels, weight),
        )


def _labels(fields: Fields) -> Tensor:
    """Take the labels, as `(batch, numbers)`."""
    labels = given_labels(fields)
    # A model of one number gives `(batch, 1)`, and data mostly one label a sample.
    if labels.dim() == 1:
        labels = labels[:, None]
    return labels
