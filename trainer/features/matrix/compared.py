"""Compute a few samples of a step in another way, and compare gradients, and modules' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from torch.nn.utils import get_total_norm

from trainer.core.format import plural
from trainer.core.micro_batch import MicroBatch
from trainer.core.tensors import dtype_name
from trainer.features.matrix.matrix import AxisFound
from trainer.verify.case import Case
from trainer.verify.comparison import Errors, Gradient
from trainer.verify.reduced import UNITS, as_step
from trainer.verify.trace import record_trace

Within = Callable[[], AbstractContextManager[object]]


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
        """Compare a gradient; where it is another, name the module at fault."""
        errors = self.case.errors(found, self.expected)
        module, reason = None, f"{self.samples}, {what}"
        if not errors.is_exact:
            module, reason = self.blamed(found, what, changed, 10 * errors.limit, within)
        return verdict_of(errors, self.case.limit_dtype, reason, module)

    def blamed(
        self,
        found: Gradient,
        what: str,
        changed: Case | None,
        limit: float,
        within: Within = nullcontext,
    ) -> tuple[str, str]:
        """Name the first module whose output differs by more than a limit, and say what differs.

        Where no output does, or none is known, it is the module whose gradient differs most.
        """
        if changed is not None:
            plain = record_trace(self.case, self.pieces[0])
            with within():
                other = record_trace(changed, self.pieces[0])
            for key, call in plain.calls.items():
                theirs = call.outputs.values
                ours = other.calls[key].outputs.values if key in other.calls else {}
                if relative_distance({**theirs, **ours}, theirs) > limit:
                    return key[0] or type(self.case.module).__name__, f"its output differs: {what}"
        errors = self.case.errors(found, self.expected)
        return owner_of_worst(errors), f"its gradient differs: {what}"


def relative_distance(found: Gradient, expected: Gradient) -> float:
    """Give the 2-norm of a difference, relative to that of what is expected."""
    apart = list[torch.Tensor]()
    for name, theirs in expected.items():
        apart.append(found.get(name, torch.zeros_like(theirs)).double() - theirs.double())
    whole = float(get_total_norm(map(torch.Tensor.double, expected.values())))
    return float(get_total_norm(apart)) / (whole or 1.0)


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
