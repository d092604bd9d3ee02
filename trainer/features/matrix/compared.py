"""Compute a few samples of a step in another way, and compare gradients, and modules' outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch

from trainer.core.format import plural
from trainer.core.micro_batch import MicroBatch
from trainer.core.tensors import dtype_name
from trainer.features.matrix.matrix import AxisFound
from trainer.verify.case import Case
from trainer.verify.comparison import Errors, Gradient
from trainer.verify.reduced import UNITS, as_step
from trainer.verify.trace import record_trace

Within = Callable[[], AbstractContextManager[object]]


class NotThere(Exception):  # noqa: N818 - no error
    """Why a way cannot be run here."""


@final
@dataclass(frozen=True)
class Reference:
    """A few samples of the step, and their gradient by the run's own execution, without draws."""

    case: Case
    pieces: Sequence[MicroBatch]
    expected: Gradient

    @classmethod
    def of(cls, case: Case, size: int = 2) -> Reference:
        """Compute the first samples of the step, so many, or groups of them, in a micro-batch."""
        units = case.units()[:UNITS]
        groups = [np.concatenate(units[i : i + size]) for i in range(0, len(units), size)]
        pieces = as_step(case, groups)
        return cls(case, pieces, case.gradient(pieces))

    @property
    def samples(self) -> str:
        """How many there are, in words."""
        return plural(sum(len(each.ids) for each in self.pieces), "sample")

    def judged(
        self, found: Gradient, what: str, changed: Case | None = None, within: Within = nullcontext
    ) -> AxisFound:
        """Compare a gradient; where it is another, name the module whose output departs first."""
        errors = self.case.errors(found, self.expected)
        module, reason = None, f"{self.samples}, {what}"
        if not errors.is_exact:
            limit = 10 * errors.limit
            module = changed and self.departing(changed, limit, within)
            reason = f"its output differs {what}"
            if module is None:
                module, reason = owner_of_worst(errors), f"its gradient differs {what}"
        return verdict_of(errors, self.case.limit_dtype, reason, module)

    def departing(self, changed: Case, limit: float, within: Within) -> str | None:
        """Name the first module whose forward ends with another output, innermost first."""
        plain = record_trace(self.case, self.pieces[0])
        with within():
            other = record_trace(changed, self.pieces[0])
        for key, call in plain.calls.items():
            if key not in other.calls:
                continue
            theirs, ours = call.outputs.values, other.calls[key].outputs.values
            shared = {path: ours[path] for path in theirs if path in ours}
            if (
                shared
                and relative_distance(shared, {path: theirs[path] for path in shared}) > limit
            ):
                return key[0] or type(self.case.module).__name__
        return None


def relative_distance(found: Gradient, expected: Gradient) -> float:
    """Give the 2-norm of a difference, relative to that of what is expected."""
    apart = whole = 0.0
    for name, theirs in expected.items():
        ours = found.get(name, torch.zeros_like(theirs))
        apart += float((ours.double() - theirs.double()).square().sum())
        whole += float(theirs.double().square().sum())
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)


def proven_word(dtype: torch.dtype) -> Literal["exact", "to_rounding"]:
    """Float32 proves what it can: no error beyond its rounding."""
    return "exact" if dtype == torch.float64 else "to_rounding"


def verdict_of(errors: Errors, dtype: torch.dtype, reason: str, module: str | None) -> AxisFound:
    """Say that it is the same step where errors are rounding, and another elsewhere."""
    return AxisFound(
        verdict=proven_word(dtype) if errors.is_exact else "not_exact",
        reason=reason,
        module=module,
        measured=errors.largest,
        bound=errors.limit,
        dtype=dtype_name(dtype),
    )


def owner_of_worst(errors: Errors) -> str:
    """Name the module of the weight whose gradient differs most."""
    name, _ = errors.worst[0]
    return name.rpartition(".")[0] or name
