"""Score the predictions of all held-out samples by the libraries of the field.

Each class imports its library when it is built, which is before data or a model are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, Protocol, final, runtime_checkable

from trainer.assemble.instantiate import construct
from trainer.config.data_sets import component_of
from trainer.config.metric_names import KNOWN_METRICS, METRICS_KEY, sum_metrics
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, TrainError
from trainer.core.user_code import described

_Texts = Sequence[str]
_Tags = Sequence[Sequence[str]]


@runtime_checkable
class PredictionMetric(Protocol):
    """Whatever has a method `score`; its `reads`, if any, says which of the following it takes.

    Called with all samples that are evaluated, in the order of their ids: texts where the
    objective writes them; a list of classes, by their names, of each sample with a label per
    token; else the class of each.
    """

    def score(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        """Give figures by name."""


def prediction_metrics(config: RunConfig) -> list[PredictionMetric]:
    """Build the metrics of predictions that a config names: ours, and classes of the user's own."""
    metrics, sums = list[PredictionMetric](), sum_metrics(config.objective.metrics)
    for each in config.objective.metrics:
        if each in sums:
            continue
        ours = KNOWN_METRICS["predictions"].get(each) if isinstance(each, str) else None
        section = ours or ({"_target_": each} if isinstance(each, str) else each)
        is_typed = config.objective.typed_target and ours is None
        component = component_of({"_target_": None, **section}, METRICS_KEY, typed=is_typed)
        metrics.append(construct(component, METRICS_KEY, PredictionMetric, config.trust))
    return metrics


def score_lines(
    metrics: Sequence[PredictionMetric], lines: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Score the lines with a label; no figure where there is none."""
    labelled = [line for line in lines if line["label"] is not None]
    predictions = [line["prediction"] for line in labelled]
    references = [line["label"] for line in labelled]
    figures = dict[str, float]()
    for metric in metrics if labelled else ():
        try:
            found = metric.score(predictions, references)
            figures |= {str(name): float(value) for name, value in found.items()}
        except TrainError:
            raise
        except Exception as error:
            place = f"{METRICS_KEY}: `score` of {type(metric).__name__}"
            raise ConfigError(f"{place}: {described(error)}") from error
    return figures


@final
class EntityF1(PredictionMetric):
    """Precision, recall and F1 over the entities of all samples, by seqeval's default rules.

    An entity counts as right if its kind and both of its ends are: CoNLL's rules, which take an
    `I-` that follows no other of its kind for a beginning.
    """

    reads = "tags"

    def __init__(self) -> None:
        from seqeval import metrics  # type: ignore[import-untyped]  # noqa: PLC0415 - an option

        self._scores = {
            "entity_f1": metrics.f1_score,
            "entity_precision": metrics.precision_score,
            "entity_recall": metrics.recall_score,
        }

    def score(self, predictions: _Tags, references: _Tags) -> Mapping[str, float]:
        """Give shares from 0 to 1; 0 where there is no entity to divide by."""
        given = (references, predictions)
        return {name: score(*given, zero_division=0) for name, score in self._scores.items()}


@final
class RougeL(PredictionMetric):
    """The F1 of the longest common subsequence of words, a mean over texts, from 0 to 1.

    Words are runs of the letters a to z and digits, in lower case; with `use_stemmer` of a Porter
    stemmer.
    """

    reads = "texts"

    def __init__(self, *, use_stemmer: bool = False) -> None:
        from rouge_score.rouge_scorer import (  # type: ignore[import-untyped]  # noqa: PLC0415
            RougeScorer,
        )
        from rouge_score.tokenizers import (  # type: ignore[import-untyped]  # noqa: PLC0415
            DefaultTokenizer,
        )

        # The one that it takes by default, of which it would log a line
        tokenizer = DefaultTokenizer(use_stemmer)
        self._scorer = RougeScorer(["rougeL"], tokenizer=tokenizer)

    def score(self, predictions: _Texts, references: _Texts) -> Mapping[str, float]:
        """See the class."""
        pairs = map(self._scorer.score, references, predictions)
        return {"rouge_l": fmean(pair["rougeL"].fmeasure for pair in pairs)}


@final
class CorpusScore(PredictionMetric):
    """A score of sacreBLEU over all texts, from 0 to 100, as it computes it by default.

    `chrf` is the F-score of n-grams of characters, and `bleu` that of words by its tokenizer 13a.
    """

    reads = "texts"

    def __init__(self, name: Literal["chrf", "bleu"]) -> None:
        import sacrebleu  # noqa: PLC0415 - an option

        self._name, self._score = name, getattr(sacrebleu, f"corpus_{name}")

    def score(self, predictions: _Texts, references: _Texts) -> Mapping[str, float]:
        """See the class."""
        return {self._name: self._score(predictions, [references]).score}


@final
class ExactMatch(PredictionMetric):
    """The share of texts that are equal, but for blanks around them."""

    reads = "texts"

    def score(self, predictions: _Texts, references: _Texts) -> Mapping[str, float]:
        """See the class."""
        pairs = zip(predictions, references, strict=True)
        right = sum(found.strip() == wanted.strip() for found, wanted in pairs)
        return {"exact_match": right / len(references)}
