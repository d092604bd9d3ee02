"""Score predictions of what is held out, refuse metrics with nothing to score, and say the cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Self, final

from trainer.assemble.features import Feature
from trainer.assemble.instantiate import construct
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.config.data_sets import component_of
from trainer.config.messages import first_of
from trainer.config.metric_names import KNOWN_METRICS, METRICS_KEY, sum_metrics
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, TrainError
from trainer.core.format import METRIC_TITLES, plural
from trainer.core.rows import Row, row
from trainer.core.user_code import described
from trainer.data.collate import LABELS
from trainer.data.loader import Request
from trainer.features.text_metrics.answers import AnswerWriter, AskedSample, PredictedLines
from trainer.features.text_metrics.metrics import PredictionMetric
from trainer.models.facts import facts_of
from trainer.objectives.text_output import TextOutput
from trainer.training.context import StepContext
from trainer.training.data import HeldOut
from trainer.training.predictions import predict, tells_by_rows

_TRIED = 8  # samples of a part that are looked at for an answer
_TAG = re.compile("O|[BIES]-.+")


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
        self._found: Mapping[str, PredictedLines] = {}

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the metrics that a config names: ours, and classes of the user's own."""
        metrics, sums = list[PredictionMetric](), sum_metrics(config.objective.metrics)
        for each in config.objective.metrics:
            if each in sums:
                continue
            ours = KNOWN_METRICS["predictions"].get(each) if isinstance(each, str) else None
            section = ours or ({"_target_": each} if isinstance(each, str) else each)
            is_typed = config.objective.typed_target and ours is None
            component = component_of({"_target_": None, **section}, METRICS_KEY, typed=is_typed)
            metrics.append(construct(component, METRICS_KEY, PredictionMetric, config.trust))
        return cls(metrics, config.log.generate_tokens, fills_lines=config.eval.predictions)

    def check(self, run: Run) -> None:
        """Refuse metrics of texts for what writes none, and of entities for other classes."""
        objective, parts = run.model.objective, [*run.data.held_out.values()]
        kind = type(objective).__name__
        for metric in self._metrics if parts else ():
            reads, fault = getattr(metric, "reads", None), None
            if objective.coupling.kind != "none" and not tells_by_rows(objective):
                fault = f"{kind} predicts no sample alone: {objective.coupling.why}"
            elif reads == "tags":
                fault = _no_tags(run)
            elif reads == "texts" and not any(_has_answers(run, part) for part in parts):
                fault = (
                    f"{kind} finds no answer in the held-out samples; type it for chats, prompts "
                    "with completions, and sources with targets"
                )
            elif reads == "texts" and any(_decodes_nothing(part) for part in parts):
                fault = "the data have no `decode`, which turns tokens into text"
            if fault is not None:
                raise ConfigError(f"{METRICS_KEY}: {type(metric).__name__}: {fault}")

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """Say what evaluations compute beside the loss, and which metric a name stands for."""
        run, parts = run_plan.run, [*run_plan.run.data.held_out.values()]
        found = [Row(values={METRIC_TITLES: _titles(run)})]
        if not (self._metrics and parts):
            return found
        samples = sum(part.num_samples for part in parts if not part.joins)
        text = f"{plural(samples, 'held-out sample')} a second time, one by one"
        if any(_has_answers(run, part) for part in parts):
            most = plural(self._most, "token")
            text = f"an answer of up to {most} to each of {plural(samples, 'held-out sample')}"
        text += ", at every evaluation"
        if run.config.eval.samples is None:
            text += "; eval.samples=100 takes fewer"
        return [*found, row("predictions", text, group="computed", predicted_samples=samples)]

    def figures(
        self, context: StepContext, parts: Mapping[str, HeldOut], was_asked: Callable[[], bool]
    ) -> Mapping[str, Mapping[str, float]]:
        """Score each part; one that joins others has their lines."""
        lines = dict[str, PredictedLines]()
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
        """Score the lines with a label; no figure where there is none."""
        labelled = [line for line in lines if line["label"] is not None]
        predictions = [line["prediction"] for line in labelled]
        references = [line["label"] for line in labelled]
        figures = dict[str, float]()
        for metric in self._metrics if labelled else ():
            try:
                found = metric.score(predictions, references)
                figures |= {str(name): float(value) for name, value in found.items()}
            except TrainError:
                raise
            except Exception as error:
                place = f"{METRICS_KEY}: `score` of {type(metric).__name__}"
                raise ConfigError(f"{place}: {described(error)}") from error
        return figures

    def _lines(
        self, context: StepContext, part: HeldOut, was_asked: Callable[[], bool]
    ) -> PredictedLines:
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


def _has_answers(run: Run, part: HeldOut) -> bool:
    """Whether any of a few samples has an answer that the objective can write."""
    view = part.loader.dataset
    for place in view.spaced(_TRIED):
        request = Request(ids=(place,), epoch=0, pad_to=int(view.lengths[place]))
        if AskedSample.of(run.model.objective, part.loader.load(request)) is not None:
            return True
    return False


def _decodes_nothing(part: HeldOut) -> bool:
    """Whether nothing turns the tokens of a part into text."""
    facts = part.loader.dataset.facts
    return facts.decode_answer is None and facts.decode is None


def _no_tags(run: Run) -> str | None:
    """Say why the classes are no entities; None where they are."""
    objective, names = run.model.objective, run.data.train.facts.label_names or ()
    writes = objective.predicts_next or objective.writes_labels
    if objective.class_axis != -1 or writes:
        return f"{type(objective).__name__} gives no class to each token, as token_classify does"
    odd = [name for name in names if not _TAG.fullmatch(name)]
    if not names or odd:
        there = first_of(odd) or "numbers"
        return f"takes classes named as O, B-PER and I-PER are; the data have {there}"
    return None


def _titles(run: Run) -> dict[str, str]:
    """Give what a person reads in place of a name that leaves open which metric it is."""
    if "f1" not in run.model.objective.named_metrics:
        return {}
    facts = run.data.train.facts
    classes, names = run.data.loader.limits.get(LABELS) or facts.num_classes, facts.label_names
    if classes is None:
        return {"f1": "f1 (macro, or of the second of two classes)"}
    if classes != 2:  # noqa: PLR2004
        return {"f1": "f1 (macro)"}
    return {"f1": f"f1 (binary, of {names[1] if names else 'class 1'})"}
