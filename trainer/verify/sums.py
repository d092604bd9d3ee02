"""Check that loss sums and weights add up over the samples of a micro-batch.

A loss that is no sum can be exact for one cut, a mean over micro-batches of one size for example,
so that it is checked on its own. What else a model adds to its loss, as routers do, is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from trainer.core.micro_batch import MicroBatch
from trainer.objectives.base import Sums
from trainer.objectives.model_loss import REDUCTIONS, ModelLoss
from trainer.verify.align import Share
from trainer.verify.copies import Scratch
from trainer.verify.trace import Trace, compare, record

TOLERANCE = 1e-9
"""Relative difference of two sums that is rounding."""

SINGLE_TOLERANCE = 1e-4
"""The same of sums in fewer bits than float64."""

WEIGHT_TOLERANCE = 1e-6
"""Relative; a weight may be a sum of the data's own float32 numbers."""

ROOT = ("", 0)
"""The first call of the model itself."""

Faults = list[tuple[str, str]]
"""Names of the objective or of an output of the model, each with the reason."""


@final
@dataclass(frozen=True, slots=True)
class Sight:
    """The loss sums of the samples of a trace in smaller micro-batches, by the same outputs.

    Attributes:
        parts: the smaller micro-batches.
        places: where they lie in the larger one.
        sums: of each.
        repads: whether they differ from the trace in their padding alone.
    """

    parts: Sequence[MicroBatch]
    places: Sequence[Share]
    sums: Sequence[Sums]
    repads: bool

    def apart(self, term: str) -> list[float]:
        """Give one term of each; a group without a loss term may leave it out."""
        return [float(each.losses.get(term, 0.0)) for each in self.sums]


def sum_faults(scratch: Scratch, trace: Trace, sights: Sequence[Sight]) -> Faults:
    """Name every loss term that is no sum over samples.

    Args:
        scratch: as it was when the trace was recorded.
        trace: of the samples together.
        sights: of the same samples apart; what changes more comes later.
    """
    objective, faults = scratch.kit.objective, Faults()
    for term, loss in trace.sums.losses.items():
        tolerance = _tolerance(loss)
        wrong = [s for s in sights if not _adds_up(float(loss), s.apart(term), tolerance)]
        if not wrong:
            continue
        apart = wrong[-1].apart(term)
        if wrong[0].repads and len(sights) > 1:
            reason = (
                f"`{term}` changes with padding: {sum(apart):.6g} without, {float(loss):.6g} with "
                "it; mask padded positions in the loss, or use samples of one length"
            )
        else:
            reason = (
                f"`{term}` is no sum: {len(trace.micro_batch.ids)} samples together give "
                f"{float(loss):.6g}, in {len(apart)} groups they add up to {sum(apart):.6g}; it "
                "divides by a count of its own, or couples samples; "
                f"{_remedy(scratch, trace.micro_batch, wrong)}"
            )
        faults.append((f"objective {type(objective).__name__}", reason))
    return faults


def weight_faults(scratch: Scratch, trace: Trace, parts: Sequence[MicroBatch]) -> Faults:
    """Name every weight of a loss that is no count over samples."""
    whole, name = trace.micro_batch, f"objective {type(scratch.kit.objective).__name__}"
    return [
        (
            name,
            f"the weight of `{term}` does not add up: {len(whole.ids)} samples together weigh "
            f"{weight:g}, in {len(parts)} groups {sum(m.weights[term] for m in parts):g}; "
            "`weights` must count what `sums` adds up, or the loss is not divided by it",
        )
        for term, weight in whole.weights.items()
        if term in trace.sums.losses
        and not _adds_up(weight, [m.weights[term] for m in parts], WEIGHT_TOLERANCE)
    ]


def added_faults(
    scratch: Scratch, trace: Trace, parts: Sequence[MicroBatch]
) -> tuple[Faults, bool]:
    """Name the losses beside `.loss` in a model's output that its loss depends on.

    A router's load balance is a statistic of a micro-batch.

    Returns:
        Those that are no sum over samples; and whether the loss is a sum but for them.
    """
    added, faults, kind = _added(trace), Faults(), type(scratch.module).__name__
    traces = [record(scratch, part) for part in parts] if added else []
    tolerance = max((_tolerance(value) for value, _ in added.values()), default=0.0)
    for name, (value, _) in added.items():
        apart = [float(_added(part).get(name, (math.nan, 0.0))[0]) for part in traces]
        if not _adds_up(float(value), apart, tolerance):
            reason = (
                f"`{name}`, which {kind} adds to its loss, is no sum over samples but a "
                f"statistic of the micro-batch, as a router's load balance is: together it is "
                f"{float(value):.6g}, in {len(parts)} groups {sum(apart):.6g} in all; switch it "
                "off in the model's config (output_router_logits=False, or a coefficient of 0), "
                "or use one micro-batch per step"
            )
            faults.append((f"{kind}.{name}", reason))
    left = [_without_added(part) for part in traces]
    return faults, bool(faults) and _adds_up(_without_added(trace), left, tolerance)


def _added(trace: Trace) -> Mapping[str, tuple[Tensor, float]]:
    """List losses beside the model's own by name, each with what it counts in the loss."""
    if ROOT not in trace.calls:
        return {}
    outputs, found = trace.calls[ROOT].outputs, {}
    for path, gradient in outputs.gradients.items():
        name = path.rpartition(".")[2]
        is_other = name.endswith("loss") and name != "loss" and not outputs.values[path].dim()
        if is_other and float(gradient):
            found[name] = outputs.values[path], float(gradient)
    return found


def _without_added(trace: Trace) -> float:
    added = sum(float(value) * factor for value, factor in _added(trace).values())
    return sum(float(loss) for loss in trace.sums.losses.values()) - added


def _tolerance(loss: Tensor) -> float:
    return TOLERANCE if loss.dtype == torch.float64 else SINGLE_TOLERANCE


def _adds_up(together: float, apart: Sequence[float], tolerance: float) -> bool:
    if not math.isfinite(together) and not math.isfinite(sum(apart)):
        return True
    size = max(map(abs, apart), default=0.0)  # signed sums may cancel
    limit = max(tolerance * max(size, abs(together)), 1e-12)
    return abs(together - sum(apart)) <= limit


def _remedy(scratch: Scratch, whole: MicroBatch, wrong: Sequence[Sight]) -> str:
    """Say what makes a sum of it; for a model's own loss, the first settings that do are typed."""
    objective = scratch.kit.objective
    if not isinstance(objective, ModelLoss):
        return "let `sums` add up over samples, and `weights` count what it adds up"
    drops = "the model drops num_items_in_batch: " if objective.reduction == "sum" else ""
    remedy = "take an objective that sums, such as next_token or classify"
    for other, typed in _settings(objective):
        changed = replace(scratch, kit=replace(scratch.kit, objective=other))
        with suppress(Exception):  # a model may not run under other settings
            trace = record(changed, whole)
            if _is_sum(changed, trace, wrong[0]):
                if all(_is_sum(changed, trace, sight) for sight in wrong[1:]):
                    return f"{drops}type {typed}, or {remedy}"
                remedy = f"it also changes with padding, which it does not mask; {remedy}"
                break
    return drops + remedy


def _is_sum(scratch: Scratch, trace: Trace, sight: Sight) -> bool:
    passes = [compare(scratch, trace, m, p) for m, p in zip(sight.parts, sight.places, strict=True)]
    together = trace.sums.losses["model_loss"]
    sums = [float(each.sums.losses["model_loss"]) if each.sums else math.nan for each in passes]
    return _adds_up(float(together), sums, _tolerance(together))


def _settings(objective: ModelLoss) -> Iterator[tuple[ModelLoss, str]]:
    """List the other settings of a model's own loss, the likeliest first.

    Yields:
        An objective, and what is typed for it.
    """
    flipped = f"objective.causal={str(not objective.causal).lower()}"
    if objective.reduction == "mean":
        yield replace(objective, causal=not objective.causal), flipped
    (other,) = set(REDUCTIONS) - {objective.reduction}
    typed = f"objective.reduction={other}"
    yield replace(objective, reduction=other), typed
    if other == "mean":
        yield replace(objective, reduction=other, causal=not objective.causal), f"{typed} {flipped}"
