"""Learn what another model gives, beside the labels (Hinton et al. 2015, 1503.02531)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, final

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.components import Part, Positive, WeightsPath
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.core.rows import Row, RunFacts, row
from trainer.data.samples import INPUT_IDS
from trainer.features.distill.teacher import load_teacher
from trainer.models.bind import ModelRun
from trainer.objectives.base import (
    ModelCall,
    Objective,
    Sums,
    at_least_single,
    labels_of,
    logits_of,
    without_labels,
)
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken, shifted_labels, shifted_weight
from trainer.objectives.text_output import TextOutput
from trainer.objectives.weighting import weight_of, weighted

_OF_LABELS: Mapping[str, NextToken | Classify] = {
    "next_token": NextToken(),
    "classify": Classify(),
    "token_classify": Classify(class_axis=-1),
}


@final
@dataclass(frozen=True, kw_only=True)
class Distill(Objective):
    """The divergence of a model's outputs from a teacher's, and the cross entropy of the labels.

    At each label that is a loss term both models give logits. The loss is `alpha * T^2 * KL(p || q)
    + (1 - alpha) * cross entropy`, where `p` and `q` are the softmax of the teacher's and of the
    model's logits over `T`, the temperature. `T^2` keeps gradients as large as those of labels.
    Both terms are divided by the number of labels.
    """

    metric_names = ("accuracy",)
    label_kind = "classes"
    sums_samples = True
    predicts_next = True

    teacher: WeightsPath
    temperature: Positive = 2.0
    alpha: Part = 0.5  # share of the teacher's term; 1 leaves the labels' out
    labels: Literal["next_token", "classify", "token_classify"] | None = None

    def __post_init__(self) -> None:
        if not self.alpha:
            raise ConfigError("objective.alpha=0: leaves the teacher out; leave out objective, too")

    def frozen_model(self, module: nn.Module, *, has_base: bool) -> nn.Module | None:
        """See the base class."""
        return load_teacher(self.teacher)

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """Name the teacher."""
        text = f"{self.teacher}, temperature {self.temperature:g}, alpha {self.alpha:g}"
        return [row("teacher", text, teacher=self.teacher)]

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the labels, under every name."""
        ids, labels = fields.get(INPUT_IDS), labels_of(fields)
        is_open = self.labels is None and ids is not None and ids.shape == labels.shape
        if is_open and ((labels != ids) & (labels != IGNORED)).any():
            raise ConfigError(
                "objective.labels=null: labels are sequences, but not the input_ids themselves; "
                "type objective.labels=token_classify, or next_token, which shifts them"
            )
        count = self._of_labels(fields).weights(fields)["accuracy"]
        names = ["distillation", "accuracy"] + ["cross_entropy"] * (self.alpha < 1)
        return dict.fromkeys(names, count)

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Run both models on the same fields, and sum over labels, in float32 at least."""
        run, given = cast("ModelRun", model), without_labels(fields)
        by_labels = self._of_labels(fields)
        logits = logits_of(run(given))
        with run.frozen() as teacher:
            soft = logits_of(teacher(given))
        if soft.shape != logits.shape:
            raise ConfigError(
                f"objective.teacher={self.teacher}: gives logits of shape {(*soft.shape,)}, and "
                f"the model of {(*logits.shape,)}; take a teacher of the same tokens or classes"
            )
        sums = by_labels.sums(lambda _: logits, fields)
        targets = labels_of(fields)
        weight = weight_of(fields, targets)
        if by_labels.predicts_next:
            targets, weight = shifted_labels(fields), shifted_weight(fields)
        terms = self._divergences(logits, soft, by_labels.class_axis or -1)
        terms = terms.masked_fill(targets == IGNORED, 0.0)
        losses = {"distillation": self.alpha * weighted(terms, weight).sum()}
        if self.alpha < 1:
            losses["cross_entropy"] = (1 - self.alpha) * sums.losses["cross_entropy"]
        return replace(sums, losses=losses, terms=None)

    def _divergences(self, logits: Tensor, soft: Tensor, axis: int) -> Tensor:
        """Give `T^2 * KL` of each label."""
        q = (at_least_single(logits) / self.temperature).log_softmax(axis)
        p = (at_least_single(soft) / self.temperature).log_softmax(axis)
        return self.temperature**2 * F.kl_div(q, p, reduction="none", log_target=True).sum(axis)

    def _of_labels(self, fields: Fields) -> NextToken | Classify:
        """Give the objective of the labels alone, by what is typed or by their shape."""
        of = self.labels
        if of is None:
            labels = fields.get("labels")
            is_sequence = labels is not None and labels.ndim == 2  # noqa: PLR2004 - (batch, time)
            of = "next_token" if is_sequence and INPUT_IDS in fields else "classify"
        return _OF_LABELS[of].with_metrics(self.named_metrics)

    def predictions(self, output: Any, fields: Fields) -> Sequence[tuple[Any, Any]]:  # noqa: ANN401
        """See the base class."""
        return self._of_labels(fields).predictions(output, fields)

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Predict as without a teacher."""
        return self._of_labels(fields).predict(model, fields, text)
