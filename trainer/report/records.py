"""Record what happened: plain values, numbers and words only.

plan.json and result.json are mappings that are written as they are, and printed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

Record = Mapping[str, Any]
"""What plan.json or result.json holds."""

Noun = Literal["token", "sample"]
Verdict = Literal["exact", "exact_without_dropout", "not_exact", "not_proven"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended.

    Attributes:
        result: of result.json.
        taken: by this process.
        noun: what speed counts, for a person.
        peak_of: whose memory was measured: `tensors`, or `the whole process`.
        unit: of the held-out loss; None where an objective of the user's own does not say.
        sample: text the model generated, any characters; None where there is none to show.
        commands: to look further with.
    """

    result: Record
    taken: int
    noun: Noun = "token"
    peak_of: str = "tensors"
    unit: str | None = "nats"
    sample: str | None = None
    commands: tuple[str, ...] = ()


def is_noise(eval_loss: float | None, baselines: Mapping[str, float]) -> bool:
    """Whether every simple model has a better held-out loss: what this one generates is noise."""
    return eval_loss is not None and any(baselines) and eval_loss > max(baselines.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `train verify` found: the planned step's gradient against a reference.

    Attributes:
        verdict: `exact` where the error is at most 1e-10, in float64, or within the rounding of
            float32 where the model runs in nothing else, and every loss is a sum over samples;
            `exact_without_dropout`; `not_exact`; `not_proven` where something cannot be compared.
        max_relative_error: over parameters, of max absolute difference / max absolute reference.
        reference: `whole batch`, or `sample by sample, summed` where the whole does not fit.
        dtype: both were computed in, e.g. `float64`.
        worst: parameters by name with their error, the largest first.
        culprits: modules by name with the reason why they depend on the cut.
        num_parameters: tensors compared.
        micro_batches: of the planned step.
        global_batch: samples of the step.
        limit: largest error that is rounding: 1e-10 in float64; in float32 as measured, for the
            worst parameter.
        notes: what a reader of the verdict must know, one line each.
    """

    verdict: Verdict
    max_relative_error: float
    reference: str
    dtype: str
    worst: tuple[tuple[str, float], ...] = ()
    culprits: tuple[tuple[str, str], ...] = ()
    num_parameters: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None
    limit: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the step is exact as it is."""
        return self.verdict == "exact"

    def to_json(self) -> dict[str, Any]:
        """Give verify.json."""
        return {
            "verdict": self.verdict,
            "exact": self.exact,
            "max_relative_error": self.max_relative_error,
            "reference": self.reference,
            "dtype": self.dtype,
            "culprits": [{"module": name, "reason": reason} for name, reason in self.culprits],
            "worst": [{"parameter": name, "error": error} for name, error in self.worst],
            "limit": self.limit,
            "notes": list(self.notes),
        }
