"""Checks an objective: its sums and its weights must add up over the samples of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from trainer.core.micro_batch import MicroBatch
from trainer.objectives.base import IGNORED, Objective, Sums
from trainer.objectives.model_loss import ModelLoss

TOLERANCE = 1e-9
"""Relative; sums of a model in float32 are given more."""

WEIGHT_TOLERANCE = 1e-6
"""Relative; a weight may be a sum of the data's own float32 numbers."""

SINGLE_TOLERANCE = 1e-4

MAX_OTHERS = 2
"""Counts named beside the likeliest, where samples are too alike to tell them apart."""

Faults = list[tuple[str, str]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The loss sums of some samples, together and apart, under the same model outputs.

    Attributes:
        whole: the samples together.
        parts: the same samples in smaller micro-batches.
        sums: of both.
        repads: whether the parts are padded otherwise than the whole.
        tolerance: relative difference that is rounding.
    """

    whole: MicroBatch
    parts: Sequence[MicroBatch]
    sums: tuple[Sums, Sequence[Sums]]
    repads: bool
    tolerance: float

    def values(self, term: str) -> tuple[float, list[float]]:
        """Give one term together and apart."""
        together, apart = self.sums
        # A group without a loss term may leave it out.
        sums = [float(each.losses.get(term, 0.0)) for each in apart]
        return float(together.losses[term]), sums

    def agrees(self, term: str) -> bool:
        """Tell whether the term adds up."""
        together, apart = self.values(term)
        size = max(map(abs, apart), default=0.0)  # signed sums may cancel
        close = abs(together - sum(apart)) <= self.tolerance * size
        return close or _agree(together, sum(apart), self.tolerance)

    def means(self, term: str) -> list[str]:
        """Say what the term would be a mean over, all that fit, the most likely first."""
        together, apart = self.values(term)
        counts = [_counts(term, m) for m in self.parts]
        weight = self.whole.weights[term] or 1.0
        ratios = [a / (m.weights[term] or 1.0) for a, m in zip(apart, self.parts, strict=True)]
        said = []
        for what, count in _counts(term, self.whole).items():
            here = [c[what] for c in counts]
            if _is_mean(together, apart, count, here, self.tolerance):
                said.append(f"it already divides, by the {what} of its micro-batch")
            if _is_mean(together / weight, ratios, count, here, self.tolerance):
                said.append(
                    f"it is a mean over the {what} of its micro-batch, multiplied by another count"
                )
        return said


def sum_faults(objective: Objective, sights: Sequence[Sight]) -> Faults:
    """Name every loss term that is no sum over samples, and what it is instead.

    Args:
        objective: whose scope is `sample`.
        sights: what changes more comes later.
    """
    name = f"objective {type(objective).__name__}"
    faults = []
    for term in sights[0].sums[0].losses if sights else ():
        wrong = [sight for sight in sights if not sight.agrees(term)]
        if wrong:
            reason = _padded(term, wrong[-1]) if wrong[0].repads and len(sights) > 1 else ""
            said = _divided(term, wrong)
            faults.append((name, reason or said + _remedy(objective, said)))
    return faults


def _divided(term: str, wrong: Sequence[Sight]) -> str:
    sight = wrong[-1]
    together, apart = sight.values(term)
    said = (
        f"`{term}` is no sum: {len(sight.whole.ids)} samples together give {together:.6g}, in "
        f"{len(apart)} groups they add up to {sum(apart):.6g}"
    )
    common = [m for m in wrong[0].means(term) if all(m in other.means(term) for other in wrong)]
    if common:
        return f"{said}; {common[0]}{_also(common)}"
    first = wrong[0].means(term)
    if first:
        return f"{said}; {first[0]}, and it changes with padding, which it does not mask"
    return f"{said}; it divides by a count of its own, or couples samples"


def _also(means: Sequence[str]) -> str:
    """Name what else fits, where these samples cannot tell it apart."""
    others = [_counted(mean) for mean in means if _counted(mean) != _counted(means[0])]
    others = list(dict.fromkeys(others))[:MAX_OTHERS]
    return f" (or the {', or the '.join(others)}: the same number here)" if others else ""


def _counted(mean: str) -> str:
    return mean.partition(" the ")[2].partition(" of its micro-batch")[0].rstrip(",")


def _padded(term: str, sight: Sight) -> str:
    together, apart = sight.values(term)
    return (
        f"`{term}` changes with padding: {sum(apart):.6g} without, {together:.6g} with it; mask "
        "padded positions in the loss, or use samples of one length"
    )


def weight_faults(
    objective: Objective,
    whole: MicroBatch,
    parts: Sequence[MicroBatch],
    losses: Collection[str],
) -> Faults:
    """Name every weight of a loss that is no count over samples."""
    return [
        (
            f"objective {type(objective).__name__}",
            f"the weight of `{term}` does not add up: {len(whole.ids)} samples together weigh "
            f"{weight:g}, in {len(parts)} groups {sum(m.weights[term] for m in parts):g}; it must "
            "count what the sum runs over, or the loss is not divided by it",
        )
        for term, weight in whole.weights.items()
        if term in losses
        and not _agree(weight, sum(m.weights[term] for m in parts), WEIGHT_TOLERANCE)
    ]


def _agree(first: float, second: float, tolerance: float) -> bool:
    if not math.isfinite(first) and not math.isfinite(second):
        return True
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=1e-12)


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


def _remedy(objective: Objective, said: str) -> str:
    if not isinstance(objective, ModelLoss):
        return "; give the sum, and let the weight divide"
    other = f"objective.causal={str(not objective.causal).lower()}"
    keys = {
        ("sum", "divides, by the loss terms"): "objective.reduction=mean",
        ("sum", "by the labels"): f"objective.reduction=mean {other}",
        ("mean", "over the labels"): other,
    }
    fitting = [keys[at] for at in keys if at[0] == objective.reduction and at[1] in said]
    typed = f"type {fitting[0]}, or take" if fitting else "take"
    drops = "the model drops num_items_in_batch: " if objective.reduction == "sum" else ""
    return f"; {drops}{typed} an objective that sums, such as next_token or classify"
