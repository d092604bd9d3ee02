"""Let the cosine of two embeddings follow a score of their pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config.components import Positive
from trainer.core.coupling import NONE, Coupling
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.features.contrastive.contrastive import embeddings_by_name, embeddings_of, unit
from trainer.features.contrastive.text_pairs import embed
from trainer.objectives.base import ModelCall, Sums
from trainer.objectives.coupled import CoupledObjective
from trainer.objectives.text_output import TextOutput

SCORE = "score"


class PairScores(CoupledObjective):
    """Compares the cosines of pairs with the scores that the data give them, a field `score`.

    Metrics of an evaluation are the correlations of cosines and scores over all that is held out:
    `spearman`, of their ranks, and `pearson`.
    """

    metric_names = ("spearman", "pearson")

    @abstractmethod
    def loss_sum(self, cosines: Tensor, scores: Tensor) -> Tensor:
        """Sum the loss of `(samples,)` pairs."""

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count samples."""
        count = float(len(next(iter(fields.values()))))
        return dict.fromkeys(("loss", *self.metric_names), count)

    def rows(self, model: ModelCall, fields: Fields) -> Mapping[str, Tensor]:
        """Give the cosine of each pair, and its score."""
        if SCORE not in fields:
            raise ConfigError(
                f"objective: {type(self).__name__} takes pairs with a score, and the data give "
                f"{', '.join(fields)}: name its column, 'data.columns={{score: NAME}}', or type "
                "objective=contrastive"
            )
        cosines = _cosines(embed(model, fields))
        return {"cosine": cosines, SCORE: fields[SCORE].to(cosines.dtype)}

    def sums_of_rows(self, rows: Mapping[str, Tensor]) -> Sums:
        """See the base class."""
        cosines, scores = rows["cosine"], rows[SCORE]
        metrics = dict[str, Tensor]()
        if not torch.is_grad_enabled():
            # Times the samples, by whose number metrics are divided
            metrics["spearman"] = _correlation(_ranks(cosines), _ranks(scores)) * len(scores)
            metrics["pearson"] = _correlation(cosines, scores) * len(scores)
        return Sums(losses={"loss": self.loss_sum(cosines, scores)}, metrics=metrics)

    def row_predictions(self, rows: Mapping[str, Tensor]) -> Sequence[tuple[Any, Any]]:
        """Give score and cosine of each pair."""
        return [*zip(rows[SCORE].tolist(), rows["cosine"].tolist(), strict=True)]

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the cosine of each pair; of one text its embedding, of length 1."""
        output = embed(model, fields)
        if isinstance(output, Mapping) and len(output) == 1:
            return embeddings_by_name(output)
        return [{"prediction": cosine} for cosine in _cosines(output).tolist()]


@final
@dataclass(frozen=True, kw_only=True)
class CoSENT(PairScores):
    """Ranks pairs: a higher score is to have a higher cosine (Su 2022, kexue.fm/archives/8847).

    The loss of a step is `log(1 + sum exp((c_i - c_j) / temperature))` over all `i`, `j` whose
    scores are `s_i < s_j`, of the whole global batch; `c` are cosines.
    """

    coupling = Coupling("batch", why="it compares all pairs of a step")
    min_samples = 2

    temperature: Positive = 0.05

    def loss_sum(self, cosines: Tensor, scores: Tensor) -> Tensor:
        """See the base class: times the samples, by whose number it is divided.

        In the order of scores, sums over the first so many pairs serve all with a higher score.
        """
        scaled, (ordered, order) = cosines / self.temperature, scores.sort()
        # Of no pair it is as good as -inf, and without NaN in the gradient
        none = torch.finfo(scaled.dtype).min
        lower = F.pad(scaled[order].logcumsumexp(0), (1, 0), value=none)
        gaps = lower[torch.searchsorted(ordered, scores)] - scaled
        return F.pad(gaps, (1, 0)).logsumexp(0) * len(scores)


@final
@dataclass(frozen=True, kw_only=True)
class CosineSimilarity(PairScores):
    """Squares the difference of a cosine and its score, 0 to 1, divided by the samples."""

    coupling = NONE

    def loss_sum(self, cosines: Tensor, scores: Tensor) -> Tensor:
        """See the base class."""
        return (cosines - scores).square().sum()


def _cosines(output: Any) -> Tensor:  # noqa: ANN401 - models return what they like
    """Give the cosine of the two embeddings of each sample, `(samples,)`, in fp32 at least."""
    query, document = map(unit, embeddings_of(output))
    return (query * document).sum(-1)


def _ranks(values: Tensor) -> Tensor:
    """Rank values from 1; equal ones have the mean of their ranks."""
    found = values.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call] # untyped in torch
    _, places, counts = found
    ranks: Tensor = (counts.cumsum(0) - (counts - 1) / 2)[places]
    return ranks


def _correlation(one: Tensor, other: Tensor) -> Tensor:
    """Correlate two samples linearly, in float64; NaN where all values of one are equal."""
    one, other = (each.double() - each.double().mean() for each in (one, other))
    return (one * other).sum() / (one.square().sum() * other.square().sum()).sqrt()
