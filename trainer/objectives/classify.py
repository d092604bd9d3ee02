"""Classify whole samples (images, rows), every pixel, or every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config.components import ClassWeights, Share, Whole
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import ATTENTION_MASK, LABELS
from trainer.objectives.base import (
    ModelCall,
    Objective,
    Sums,
    at_least_single,
    labels_of,
    logits_from,
    logits_of,
)
from trainer.objectives.metrics import statistics_of
from trainer.objectives.text_output import TextOutput
from trainer.objectives.weighting import count_of, summed_entropy, weight_of, weighted


@dataclass(frozen=True, kw_only=True)
class Classify(Objective):
    """Cross entropy of the class, in nats; the metric is `accuracy`.

    With class weights the denominator is the sum of the weights of the labels, as in PyTorch's
    mean, and not their count. A label of -100 is no loss term.
    """

    metric_names = ("accuracy",)
    label_kind = "classes"
    sums_samples = True

    class_axis: Whole = 1  # where the classes are in the logits: 1, or -1 for a class per token
    # One number per class, or by name; None weighs all the same
    class_weights: ClassWeights | None = None
    label_smoothing: Share = 0.0  # share of the target spread over the classes, in [0, 1)

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Sum the class weights of the labels for the loss, and count them for the accuracy."""
        labels = labels_of(fields)
        often, valid = weight_of(fields, labels), labels[labels != IGNORED].long()
        count = count_of(labels, often)
        if self.class_weights is None:
            return {"cross_entropy": count, "accuracy": count}
        weights = torch.tensor([*self.class_weights], dtype=torch.float64)
        if len(valid) and not 0 <= int(valid.min()) <= int(valid.max()) < len(weights):
            raise ConfigError(
                f"objective.class_weights: {len(weights)} weights, and labels from "
                f"{int(valid.min())} to {int(valid.max())}"
            )
        of_class = weights[labels.long().clamp(min=0)]
        return {"cross_entropy": count_of(labels, weighted(of_class, often)), "accuracy": count}

    def predictions(self, output: Any, fields: Fields) -> Sequence[tuple[Any, Any]]:  # noqa: ANN401
        """Give the class of each sample, or those at its labels that are loss terms."""
        labels, classes = labels_of(fields), logits_of(output).argmax(self.class_axis)
        pairs = zip(labels, classes, strict=True)
        if labels.dim() == 1:
            return [(label.tolist(), found.tolist()) for label, found in pairs]
        return [(each[each != IGNORED].tolist(), c[each != IGNORED].tolist()) for each, c in pairs]

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the class of each sample and all chances, or the classes of its tokens or pixels."""
        logits = at_least_single(logits_from(model, fields)).movedim(self.class_axis, -1)
        chances = logits.softmax(-1)
        best, classes = chances.max(-1)
        found = list[dict[str, Any]]()
        if classes.dim() == 1:
            for number, every in zip(classes.tolist(), chances.tolist(), strict=True):
                line = {"prediction": number, "probability": every[number], "probabilities": every}
                found.append(line)
            return found
        for i, each in enumerate(classes):
            at = _wanted(fields, i, each)
            found.append({"prediction": each[at].tolist(), "probability": best[i][at].tolist()})
        return found

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over the batch, in float32 at least.

        Logits are `(batch, classes)` and labels `(batch,)`; or `(batch, classes, ...)`, with the
        classes at `class_axis`, and `(batch, ...)`.
        """
        labels = labels_of(fields).long()
        logits = at_least_single(logits_from(model, fields))
        axis = self.class_axis % logits.ndim
        if logits.shape[:axis] + logits.shape[axis + 1 :] != labels.shape:
            each, other = "(batch, classes)", "a class per token type objective=token_classify"
            if axis > 1:
                each, other = "(batch, time, classes)", "one per sample type objective=classify"
            raise ConfigError(
                f"model: logits of shape {tuple(logits.shape)} do not match labels of shape "
                f"{tuple(labels.shape)}; it needs {each}, and for {other}"
            )
        logits, weight = logits.movedim(axis, 1), None
        if (given := self.class_weights) is not None:
            if len(given) != logits.shape[1]:
                text = f"{len(given)} weights for {logits.shape[1]} classes"
                raise ConfigError(f"objective.class_weights: {text}")
            # A copy that does not wait for the device.
            weight = torch.tensor(given, dtype=logits.dtype).to(logits.device, non_blocking=True)
        often = weight_of(fields, labels)
        how = {"weight": weight, "label_smoothing": self.label_smoothing}
        entropy = summed_entropy(logits, labels, often, **how)
        metrics = {}
        # Of one label per sample it costs nothing; of one per token or pixel a step does without.
        if labels.ndim == 1 or not torch.is_grad_enabled():
            metrics["accuracy"] = weighted(logits.argmax(1) == labels, often).sum()
        logits = logits.movedim(1, -1).flatten(0, -2)
        flat = None if often is None else often.flatten()
        return Sums(
            losses={"cross_entropy": entropy},
            metrics=metrics,
            statistics=statistics_of(self, logits, labels.flatten(), flat),
        )


def _wanted(fields: Fields, sample: int, classes: Tensor) -> Any:  # noqa: ANN401 - an index
    """Say where in a sample classes are wanted: where labels are, else on all of its tokens."""
    labels, mask = fields.get(LABELS), fields.get(ATTENTION_MASK)
    if labels is not None and labels[sample].shape == classes.shape:
        return labels[sample] != IGNORED
    if mask is not None and mask[sample].shape == classes.shape:
        return mask[sample] != 0
    return ...
