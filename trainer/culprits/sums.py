"""Checks an objective: its sums and its weights must add up over the samples of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainer.micro_batch import MicroBatch
from trainer.objectives.base import IGNORED, Objective, Sums
from trainer.objectives.model_loss import ModelLoss

TOLERANCE = 1e-9
"""Relative; sums of a model in float32 are given more."""

SINGLE_TOLERANCE = 1e-4

Faults = list[tuple[str, str]]


def sum_faults(
    objective: Objective,
    whole: tuple[MicroBatch, Sums],
    parts: Sequence[tuple[MicroBatch, Sums]],
    *,
    tolerance: float = TOLERANCE,
) -> Faults:
    """Name every loss term that is no sum over samples, and what it is instead.

    Args:
        objective: whose scope is `sample`.
        whole: a micro-batch and its sums.
        parts: the same samples in smaller micro-batches, under the same model outputs.
        tolerance: relative difference that is rounding.
    """
    name = f"objective {type(objective).__name__}"
    micro_batches = [m for m, _ in parts]
    faults = []
    for term, total in whole[1].losses.items():
        together = float(total)
        alone = [float(sums.losses[term]) for _, sums in parts]
        if not _agree(together, sum(alone), tolerance):
            reason = _reason(term, together, alone, (whole[0], micro_batches), tolerance)
            faults.append((name, reason + _remedy(objective)))
    return faults + weight_faults(name, whole[0], micro_batches)


def weight_faults(name: str, whole: MicroBatch, parts: Sequence[MicroBatch]) -> Faults:
    """Name every weight that is no count over samples."""
    return [
        (
            name,
            f"the weight of `{term}` does not add up: {len(whole.ids)} samples together weigh "
            f"{weight:g}, in {len(parts)} groups {sum(m.weights[term] for m in parts):g}; it must "
            "count what the sum runs over, or the loss is not divided by it",
        )
        for term, weight in whole.weights.items()
        if not _agree(weight, sum(m.weights[term] for m in parts), TOLERANCE)
    ]


def _agree(first: float, second: float, tolerance: float) -> bool:
    if not math.isfinite(first) and not math.isfinite(second):
        return True
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=1e-12)


def _reason(
    term: str,
    together: float,
    alone: Sequence[float],
    groups: tuple[MicroBatch, Sequence[MicroBatch]],
    tolerance: float,
) -> str:
    whole, parts = groups
    said = (
        f"`{term}` is no sum: {len(whole.ids)} samples together give {together:.6g}, in "
        f"{len(parts)} groups they add up to {sum(alone):.6g}"
    )
    counts = [_counts(term, m) for m in parts]
    weight, weights = whole.weights[term], [m.weights[term] for m in parts]
    for what, count in _counts(term, whole).items():
        here = [c[what] for c in counts]
        if _is_mean(together, alone, count, here, tolerance):
            return f"{said}; it already divides, by the {what} of its micro-batch"
        ratios = [a / w if w else 0.0 for a, w in zip(alone, weights, strict=True)]
        if weight and _is_mean(together / weight, ratios, count, here, tolerance):
            return (
                f"{said}; it is a mean over the {what} of its micro-batch, multiplied by "
                "another count"
            )
    return f"{said}; it divides by a count of its own, or couples samples"


def _is_mean(
    together: float,
    alone: Sequence[float],
    count: float,
    counts: Sequence[float],
    tolerance: float,
) -> bool:
    """Tell whether a value is a mean over counted things: its products with them add up."""
    # The mean over nothing is NaN, and adds nothing.
    products = [a * c for a, c in zip(alone, counts, strict=True) if c]
    return count > 0 and _agree(together * count, sum(products), tolerance)


def _counts(term: str, micro_batch: MicroBatch) -> Mapping[str, float]:
    """Count what a mean may run over, the most likely first."""
    counts = {"loss terms": micro_batch.weights[term], "number of samples": len(micro_batch.ids)}
    labels = micro_batch.fields.get("labels")
    if labels is not None:
        counts["labels"] = float((labels != IGNORED).sum())
        if labels.dim() > 1:
            counts["labels but each row's first"] = float((labels[:, 1:] != IGNORED).sum())
    return counts | {"positions, padding counted,": micro_batch.num_positions}


def _remedy(objective: Objective) -> str:
    if not isinstance(objective, ModelLoss):
        return "; give the sum, and let the weight divide"
    if objective.reduction == "sum":
        return (
            "; the model drops num_items_in_batch: type objective.reduction=mean, or take an "
            "objective that sums, such as next_token or classify"
        )
    other = str(not objective.causal).lower()
    return (
        f"; the model's mean runs over something else: objective.causal={other}, or an "
        "objective that sums, such as next_token or classify"
    )
