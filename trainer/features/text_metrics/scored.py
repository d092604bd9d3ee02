"""Score predictions of what is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Self, final

from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.config.run_config import RunConfig
from trainer.core.rows import Row
from trainer.features.text_metrics.answers import AnswerWriter
from trainer.features.text_metrics.checks import refuse_unscored, scoring_rows
from trainer.features.text_metrics.metrics import PredictionMetric, prediction_metrics, score_lines
from trainer.models.facts import facts_of
from trainer.objectives.text_output import TextOutput
from trainer.training.context import StepContext
from trainer.training.data import HeldOut
from trainer.training.predictions import Line, predict


@final
class ScoredPredictions(Feature):
    """The metrics of a run that score predictions."""

    def __init__(
        self, metrics: Sequence[PredictionMetric], most: int, *, fills_lines: bool
    ) -> None:
        self._metrics = metrics
        self._most = most  # tokens of an answer
        self._fills_lines = fills_lines  # whether predictions.jsonl is to have the answers
        # Of the last evaluation, by the names of the parts
        self._found: Mapping[str, list[Line]] = {}

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        metrics = prediction_metrics(config)
        return cls(metrics, config.log.generate_tokens, fills_lines=config.eval.predictions)

    def check(self, run: Run) -> None:
        """See the base class."""
        refuse_unscored(self._metrics, run)

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """See the base class."""
        return scoring_rows(run_plan.run, self._most, is_scored=bool(self._metrics))

    def figures(
        self, context: StepContext, parts: Mapping[str, HeldOut], was_asked: Callable[[], bool]
    ) -> Mapping[str, Mapping[str, float]]:
        """Score each part; one that joins others has their lines."""
        lines = dict[str, list[Line]]()
        for name, part in parts.items():
            if (self._metrics or self._fills_lines) and not part.joins:
                lines[name] = self._lines(context, part, was_asked)
        self._found, figures = {**lines}, dict[str, Mapping[str, float]]()
        for name, part in parts.items() if self._metrics else ():
            if part.joins:
                joined = chain.from_iterable(lines[each] for each in part.joins)
                lines[name] = sorted(joined, key=lambda line: int(line["id"]))
            # The first rank scores them, so that all have the same.
            figures[name] = context.world.on_main(partial(self.scores, lines[name]))
        return figures

    def complete(self, part: str, lines: Sequence[dict[str, Any]]) -> None:
        """Put answers beside the losses."""
        answers = {line["id"]: line for line in self._found.get(part, ())}
        for line in lines:
            line.update(answers.get(line["id"], {}))

    def scores(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """See the base class."""
        return score_lines(self._metrics, lines)

    def _lines(
        self, context: StepContext, part: HeldOut, was_asked: Callable[[], bool]
    ) -> list[Line]:
        """Give the predictions of a part: texts where answers are written. Collective."""
        model, objective, world = context.parallel, context.model.objective, context.world
        if objective.predicts_next or objective.writes_labels:
            positions = facts_of(context.model.module).max_positions
            text = TextOutput.of(part.loader.dataset.facts, self._most, positions)
            writer = AnswerWriter(model=model, objective=objective, world=world, text=text)
            if lines := writer.lines(part, was_asked):
                return lines
        # Those of `train evaluate` follow anyway.
        return predict(model, objective, part, world, was_asked) if self._metrics else []
