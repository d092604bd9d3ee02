"""Refuse metrics that have nothing to score, and say what the others cost and stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.assemble.run import Run
from trainer.config.messages import first_of
from trainer.config.metric_names import METRICS_KEY
from trainer.core.errors import ConfigError
from trainer.core.format import METRIC_TITLES, plural
from trainer.core.rows import Row, row
from trainer.data.collate import LABELS
from trainer.data.loader import Request
from trainer.features.text_metrics.answers import AskedSample
from trainer.features.text_metrics.metrics import PredictionMetric
from trainer.training.predictions import tells_by_rows

_FEW = 100  # held-out samples that are soon computed one by one
_TRIED = 8  # samples of a part that are looked at for an answer
_TAG = re.compile("O|[BIES]-.+")


def refuse_unscored(metrics: Sequence[PredictionMetric], run: Run) -> None:
    """Refuse metrics of texts for what writes none, and of entities for other classes."""
    objective, parts = run.model.objective, [*run.data.held_out.values()]
    kind = type(objective).__name__
    for metric in metrics if parts else ():
        reads, fault = getattr(metric, "reads", None), None
        if objective.coupling.kind != "none" and not tells_by_rows(objective):
            fault = f"{kind} predicts no sample alone: {objective.coupling.why}"
        elif reads == "tags":
            fault = _no_tags(run)
        elif reads == "texts":
            fault = _no_texts(run)
        if fault is not None:
            raise ConfigError(f"{METRICS_KEY}: {type(metric).__name__}: {fault}")


def scoring_rows(run: Run, most: int, *, is_scored: bool) -> Sequence[Row]:
    """Say what evaluations compute beside the loss, and which metric a name stands for.

    An answer has `most` tokens.
    """
    found, parts = [Row(values={METRIC_TITLES: _titles(run)})], run.data.held_out.values()
    if not (is_scored and parts):
        return found
    samples = sum(part.num_samples for part in parts if not part.joins)
    text = f"{plural(samples, 'held-out sample')} a second time, one by one"
    if _has_answers(run):
        text = f"an answer of up to {plural(most, 'token')} to each of "
        text += plural(samples, "held-out sample")
    text += ", at every evaluation"
    if run.config.eval.samples is None and samples > _FEW:
        text += f"; eval.samples={_FEW} takes fewer"
    return [*found, row("predictions", text, group="computed", predicted_samples=samples)]


def _has_answers(run: Run) -> bool:
    """Whether any of a few held-out samples has an answer that the objective can write."""
    for part in run.data.held_out.values():
        view = part.loader.dataset
        for place in view.spaced(_TRIED):
            request = Request(ids=(place,), epoch=0, pad_to=int(view.lengths[place]))
            if AskedSample.of(run.model.objective, part.loader.load(request)) is not None:
                return True
    return False


def _no_texts(run: Run) -> str | None:
    """Say why no text is written, or none can be read; None where both can be."""
    if not _has_answers(run):
        return (
            f"{type(run.model.objective).__name__} finds no answer in the held-out samples; type it"
            " for chats, prompts with completions, and sources with targets"
        )
    for part in run.data.held_out.values():
        facts = part.loader.dataset.facts
        if facts.decode_answer is None and facts.decode is None:
            return "the data have no `decode`, which turns tokens into text"
    return None


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
