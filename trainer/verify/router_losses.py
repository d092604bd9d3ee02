"""Losses that a model adds to its own: a router's load balance is a statistic of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from trainer.verify.trace import Trace

ROOT = ("", 0)
"""The first call of the model itself."""

Faults = list[tuple[str, str]]


@final
@dataclass(frozen=True, slots=True)
class Added:
    """What a model says that it has added to its loss, together and apart.

    Attributes:
        faults: of what is no sum over samples.
        explains: whether the loss is a sum but for that.
    """

    faults: Faults
    explains: bool


def adds(trace: Trace) -> bool:
    """Tell whether a model's loss depends on losses beside it in its output."""
    return bool(_added(trace))


def auxiliary(model: nn.Module, whole: Trace, parts: Sequence[Trace], tolerance: float) -> Added:
    """Compare the losses beside `.loss` in a model's output, where its loss depends on them.

    Args:
        model: gives them.
        whole: of some samples as one micro-batch.
        parts: of the same samples in smaller ones.
        tolerance: relative difference that is rounding.
    """
    faults: Faults = []
    added, kind = _added(whole), type(model).__name__
    for name, (value, _) in added.items():
        apart = sum(float(_added(part).get(name, (math.nan, 0.0))[0]) for part in parts)
        if not math.isclose(float(value), apart, rel_tol=tolerance, abs_tol=1e-12):
            faults.append(
                (
                    f"{kind}.{name}",
                    f"`{name}`, which {kind} adds to its loss, is no sum over samples but a "
                    f"statistic of the micro-batch, as a router's load balance is: together it is "
                    f"{float(value):.6g}, in {len(parts)} groups {apart:.6g} in all; switch it off "
                    "in the model's config (output_router_logits=False, or a coefficient of 0), "
                    "or use one micro-batch per step",
                )
            )
    left = sum(map(_without, parts))
    agrees = math.isclose(_without(whole), left, rel_tol=tolerance, abs_tol=1e-12)
    return Added(faults, explains=bool(faults) and agrees)


def _added(trace: Trace) -> Mapping[str, tuple[Tensor, float]]:
    """List losses beside the model's own by name, each with what it counts in the loss."""
    if ROOT not in trace.calls:
        return {}
    seen = trace.calls[ROOT].outputs
    found = {}
    for path, gradient in seen.gradients.items():
        name = path.rpartition(".")[2]
        is_extra = name.endswith("loss") and name != "loss" and not seen.values[path].dim()
        if is_extra and float(gradient):
            found[name] = seen.values[path], float(gradient)
    return found


def _without(trace: Trace) -> float:
    """Give all loss sums, less what was added."""
    total = sum(float(loss) for loss in trace.sums.losses.values())
    return total - sum(float(value) * share for value, share in _added(trace).values())
