"""Take the loss that a model computes itself, as Hugging Face heads do when given labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from trainer.config.components import LossReduction
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields, output_part
from trainer.objectives.base import ModelCall, Objective, Sums, at_least_single

NUM_ITEMS = "num_items_in_batch"
"""What a Hugging Face head divides the sum of its loss terms by, where it takes it."""


@final
@dataclass(frozen=True, kw_only=True)
class ModelLoss(Objective):
    """The loss of a model that is called with its labels; the term is `model_loss`.

    Under `sum` the model is asked for a sum, by the count 1 for the `num_items_in_batch` that
    heads for causal models take. A head that drops it returns a mean, and is refused before the
    first step, with what to type. Under `mean` the model's mean is multiplied by the weight of the
    micro-batch, and is exact where it runs over just that, which `train verify` shows: for labels
    a mean over those that are not -100, for spans a mean over samples.

    The weight is the number of labels that are not -100. A causal model shifts them, so that the
    first of each row predicts nothing; under `sum` that only scales the step, under `mean` it
    must be right. Without `labels`, as in question answering, the weight is the number of samples.
    """

    is_of_model = True

    # What the model's loss is: asked to be a `sum`, or taken as a `mean`
    reduction: LossReduction = "sum"
    # Whether the model shifts the labels of a sequence. Labels of one number per sample, and real
    # numbers, are never shifted.
    causal: bool = True

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the labels that are loss terms, or the samples where there are none."""
        labels = self._apart(fields).get("labels")
        if labels is None:
            return {"model_loss": float(next(iter(fields.values())).shape[0])}
        shifts = self.causal and labels.dim() > 1 and not labels.is_floating_point()
        # The first label of a row is no term: nothing before it predicts it
        if shifts:
            labels = labels[:, 1:]
        return {"model_loss": float((labels != IGNORED).sum())}

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Take the loss out of the output of the model."""
        return self.sums_weighed(model, fields, self.weights(fields))

    def sums_weighed(self, model: ModelCall, fields: Fields, weights: Mapping[str, float]) -> Sums:
        """See the base class."""
        fields, count = self._apart(fields), dict[str, Tensor]()
        if self.reduction == "sum":
            count[NUM_ITEMS] = torch.ones((), device=next(iter(fields.values())).device)
        loss = at_least_single(_loss_of(model({**fields, **count})))
        if count:
            return Sums(losses={"model_loss": loss})
        if weight := weights["model_loss"]:
            return Sums(losses={"model_loss": loss * weight})
        # The mean over nothing is NaN. A leaf of its own keeps the step's backward uniform.
        nothing = torch.zeros_like(loss, requires_grad=torch.is_grad_enabled())
        return Sums(losses={"model_loss": nothing})

    def _apart(self, fields: Fields) -> Fields:
        """Drop the first label of each packed document, which the one before would predict."""
        if not self.causal or not {"cu_seqlens", "position_ids", "labels"} <= fields.keys():
            return fields
        labels = fields["labels"]
        if labels.is_floating_point():
            return fields
        return {**fields, "labels": labels.masked_fill(fields["position_ids"] == 0, IGNORED)}


def _loss_of(output: Any) -> Tensor:  # noqa: ANN401 - models return what they like
    """Take the loss, one number: the part `loss`, the first of a tuple, or the output itself."""
    loss = output
    if isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        loss = output_part(loss, "loss")
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
        return loss
    raise ConfigError(
        f"objective=model_loss: the model gave a {type(output).__name__} without a scalar "
        "loss: its forward must take the labels and return an object with .loss; a model that "
        "gives logits needs an objective such as next_token or classify"
    )
