"""Train a policy on pairs: DPO (Rafailov et al. 2023, 2305.18290) and ORPO (Hong et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.components import Positive, Share
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.core.rows import Row, RunFacts, row
from trainer.data.collate import LABELS
from trainer.features.preferences.pairs import answer_lengths, answer_logps, pair_rows
from trainer.models.bind import ModelRun
from trainer.objectives.base import ModelCall, Objective, Sums
from trainer.objectives.next_token import NextToken
from trainer.objectives.text_output import TextOutput

METRICS = ("rewards_accuracy", "rewards_margin", "rewards_chosen", "rewards_rejected")


@dataclass(frozen=True, kw_only=True)
class PairPolicy(Objective):
    """A loss of pairs. Metrics are means over pairs of what the model makes of both answers."""

    metric_names = METRICS
    predicts_next = True
    # Preferences move a model that can do its work already: a twentieth of the usual rate
    rate_share = 0.05

    key: ClassVar[str]  # what is typed for it

    def rows(self, fields: Fields) -> dict[str, Tensor]:
        """Put the rows of pairs under each other; a ConfigError where they have no labels."""
        rows = pair_rows(fields, self.key)
        if LABELS not in rows:
            text = "learns the tokens of answers, of which the data of a classifier have no labels"
            kind = "type objective=reward, or model.task=causal_lm for a model that answers"
            raise ConfigError(f"{self.key}: {text}; {kind}")
        return rows

    def rewards(self, rewards: Tensor) -> dict[str, Tensor]:
        """Sum the metrics from the reward of each answer, `(samples, 2)`, without a graph."""
        chosen, rejected = rewards.detach().unbind(1)
        sums = (chosen > rejected).sum(), (chosen - rejected).sum(), chosen.sum(), rejected.sum()
        return dict(zip(METRICS, sums, strict=True))

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Continue prompts, as a model does that was trained on tokens."""
        return NextToken().predict(model, fields, text)


@final
@dataclass(frozen=True, kw_only=True)
class DirectPreference(PairPolicy):
    """The loss of how much likelier the chosen answer became than the rejected one.

    `d` is the sum of log-probabilities of the chosen answer less that of the rejected one, of the
    model less those of the model before training. `sigmoid` is `-log sigmoid(beta d)`, of which
    `label_smoothing` takes a share of pairs to be the wrong way round (Mitchell 2023); `hinge` is
    `relu(1 - beta d)` (2305.10425); `ipo` is `(d - 1 / (2 beta))^2` (2310.12036), where each
    answer's sum is a mean over its tokens. Each is divided by the number of pairs.
    """

    key = "objective=dpo"

    beta: Positive = 0.1
    label_smoothing: Share = 0.0
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss != "sigmoid":
            text = f"is for objective.loss=sigmoid, not {self.loss}; leave it out"
            raise ConfigError(f"objective.label_smoothing={self.label_smoothing}: {text}")

    def frozen_model(self, module: nn.Module, *, has_base: bool) -> nn.Module | None:
        """See the base class: a copy, unless the model is still there below its adapter."""
        return None if has_base else deepcopy(module)

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """Say how pairs are compared."""
        return [row("pairs", f"{self.loss} loss, beta {self.beta:g}, against the first weights")]

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count pairs."""
        count = float(len(answer_lengths(self.rows(fields))))
        return dict.fromkeys(("dpo", *METRICS), count)

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over pairs; both models compute the same rows."""
        run, rows = cast("ModelRun", model), self.rows(fields)
        logps = answer_logps(run, rows)
        with run.frozen() as before:
            first = answer_logps(before, rows)
        ratios = logps - first
        scores = ratios
        if self.loss == "ipo":
            scores = ratios / answer_lengths(rows)
        gap = scores[:, 0] - scores[:, 1]
        if self.loss == "ipo":
            losses = (gap - 1 / (2 * self.beta)).square()
        elif self.loss == "hinge":
            losses = F.relu(1 - self.beta * gap)
        else:
            wrong = self.label_smoothing
            losses = -F.logsigmoid(self.beta * gap) * (1 - wrong)
            if wrong:
                losses = losses - F.logsigmoid(-self.beta * gap) * wrong
        return Sums(losses={"dpo": losses.sum()}, metrics=self.rewards(self.beta * scores))


@final
@dataclass(frozen=True, kw_only=True)
class OddsRatio(PairPolicy):
    """The cross entropy of the chosen answer, and `beta` times the odds of both (2403.07691).

    The first is a mean over the tokens of chosen answers. The second is `-log sigmoid` of the log
    odds ratio of the means of their log-probabilities, and is divided by the number of pairs.
    """

    key = "objective=orpo"

    beta: Positive = 0.1

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the tokens of chosen answers, and pairs."""
        lengths = answer_lengths(self.rows(fields))
        counts = dict.fromkeys(("odds_ratio", *METRICS), float(len(lengths)))
        return {"cross_entropy": float(lengths[:, 0].sum()), **counts}

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over the tokens of chosen answers, and over pairs."""
        rows = self.rows(fields)
        logps = answer_logps(cast("ModelRun", model), rows)
        means = logps / answer_lengths(rows)
        # log(p / (1 - p)) of p = exp(mean), which rounds to 1 where the mean is near 0
        odds = means - torch.log(-torch.expm1(means.clamp(max=-torch.finfo(means.dtype).eps)))
        losses = -F.logsigmoid(odds[:, 0] - odds[:, 1])
        return Sums(
            losses={"cross_entropy": -logps[:, 0].sum(), "odds_ratio": self.beta * losses.sum()},
            metrics=self.rewards(self.beta * means),
        )
