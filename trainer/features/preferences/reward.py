"""Train a model of one number to give the chosen text a larger one (Bradley and Terry 1952)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.data.collate import text_rows
from trainer.data.samples import INPUT_IDS
from trainer.features.preferences.pairs import ROWS_OF_PAIR, pair_rows
from trainer.objectives.base import (
    ModelCall,
    Objective,
    Sums,
    at_least_single,
    logits_from,
    logits_of,
)
from trainer.objectives.text_output import TextOutput

MARGIN = "margin"  # field of a pair: by how much the chosen number is to be larger


@final
@dataclass(frozen=True, kw_only=True)
class Reward(Objective):
    """`-log sigmoid(chosen - rejected - margin)` of each pair, divided by the number of pairs.

    Metrics are `accuracy`, the share of pairs whose chosen number is larger, and `gap`, its mean
    distance from the other.
    """

    metric_names = ("accuracy", "gap")

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count pairs."""
        return dict.fromkeys(("reward", *self.metric_names), float(len(fields[INPUT_IDS])))

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over pairs, in float32 at least."""
        rows = pair_rows(fields, "objective=reward")
        chosen, rejected = _numbers(logits_from(model, rows)).view(-1, ROWS_OF_PAIR).unbind(1)
        gap = chosen - rejected
        losses = -F.logsigmoid(gap - fields[MARGIN] if MARGIN in fields else gap)
        metrics = {"accuracy": (gap > 0).sum(), "gap": gap.detach().sum()}
        return Sums(losses={"reward": losses.sum()}, metrics=metrics)

    def predictions(self, output: Any, fields: Fields) -> Sequence[tuple[Any, Any]]:  # noqa: ANN401
        """Give the numbers of both texts; the label is the place of the one that was chosen."""
        return [(0, pair) for pair in _numbers(logits_of(output)).view(-1, ROWS_OF_PAIR).tolist()]

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the number of each text; of a pair both, the chosen one's first."""
        logits = logits_from(model, text_rows(fields))
        numbers = _numbers(logits).view(fields[INPUT_IDS].shape[:-1])
        # One number stands alone.
        return [{"prediction": own if own[1:] else own[0]} for own in numbers.tolist()]


def _numbers(logits: Tensor) -> Tensor:
    """Take the number of each row, `(rows,)`, in float32 at least."""
    if logits.dim() != 2 or logits.shape[1] != 1:  # noqa: PLR2004 - (rows, 1)
        raise ConfigError(
            f"objective=reward: the model gives {tuple(logits.shape)}, and one number for each "
            "text is needed; type model.task=sequence_classification model.num_classes=1"
        )
    return at_least_single(logits).squeeze(1)
