"""Watch losses and gradient norms for spikes, and for a loss that does not fall at the beginning.

It reads what is written anyway, and says something rarely: a model that learns should never be
spoken of. Both figures are compared with the median of the last steps, in standard deviations. The
median of absolute deviations estimates those, which one odd step does not move.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, final

from trainer.assemble.features import Feature
from trainer.assemble.run_plan import RunPlan
from trainer.config.amounts import warmup_steps
from trainer.core.format import loss, plural, rate

WINDOW = 32  # steps that a step is compared with
LEAST = 20  # of them, before anything is said
QUIET_STEPS = 100  # from one spike that is spoken of to the next
FAR_DEVIATIONS = 10.0  # standard deviations above the median
FAR_LOSS = 0.2  # of the median of losses, at least, and
# In nats: losses near zero are small in most steps, and not in some.
LEAST_JUMP = 0.5
FAR_NORM = 10.0  # times the median of gradient norms, at least; and above those of the beginning
BEGINNING = 100  # steps behind the warm-up after which a loss should have fallen
FIRST = 10  # losses that a loss should have fallen below
# By this share of them; by less, it is taken for chance.
FALLEN = 0.01
SMALLEST_NORM = 1e-30
SHOWN_IDS = 3


@final
class EarlyWatch(Feature):
    """Says in a line what is odd about a step."""

    def __init__(self, *, warmup_steps: int = 0, keeps_samples: bool = False) -> None:
        self._beginning, self._keeps_samples = warmup_steps + BEGINNING, keeps_samples
        self._losses, self._norms = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        # What this process began with
        self._first_losses, self._first_norms = list[float](), list[float]()
        self._began_at = 1
        self._silent_until = 0

    def planned(self, run_plan: RunPlan) -> EarlyWatch:
        """See the base class; the length of the warm-up is known by now."""
        run = run_plan.run
        warmup = warmup_steps(run.model.schedule.warmup, run.data.total_steps)
        return EarlyWatch(warmup_steps=warmup, keeps_samples=run.config.log.samples)

    def remark(self, entry: Mapping[str, Any], ids: Sequence[int]) -> str | None:
        """See the base class."""
        step, value, norm = entry["step"], entry["loss"], entry["grad_norm"]
        if value is None or norm is None or not (math.isfinite(value) and math.isfinite(norm)):
            return None
        if not self._first_losses:
            self._began_at = step
        if len(self._first_losses) < WINDOW:
            self._first_losses.append(value)
            self._first_norms.append(norm)
        found = self._plateau(step)
        if (spike := self._spike(step, value, norm)) is not None:
            more = f", ... of {len(ids)}" if len(ids) > SHOWN_IDS else ""
            where = "all in samples.jsonl" if self._keeps_samples else "log.samples=true lists all"
            found = f"{spike}; samples {', '.join(map(str, ids[:SHOWN_IDS]))}{more} ({where})"
        self._losses.append(value)
        self._norms.append(norm)
        return found

    def _spike(self, step: int, value: float, norm: float) -> str | None:
        if len(self._losses) < LEAST or step < self._silent_until:
            return None
        middle = median(self._losses)
        far = FAR_DEVIATIONS * _deviation(self._losses)
        now, usual = f"loss {loss(value)}", loss(middle)
        if value <= middle + max(far, FAR_LOSS * abs(middle), LEAST_JUMP):
            # Norms vary by factors.
            logs = [math.log(each + SMALLEST_NORM) for each in self._norms]
            high = median(logs) + max(FAR_DEVIATIONS * _deviation(logs), math.log(FAR_NORM))
            if norm <= max(math.exp(high), median(self._first_norms)):
                return None
            now, usual = f"gradient norm {rate(norm)}", rate(median(self._norms))
        self._silent_until = step + QUIET_STEPS
        return (
            f"{now} is far above that of the {len(self._losses)} steps before, {usual}: "
            "often a learning rate too high, a warm-up too short, or bad samples"
        )

    def _plateau(self, step: int) -> str | None:
        """Look once, behind the warm-up, whether the loss is where it began."""
        if step != self._beginning or self._began_at != 1 or len(self._losses) < LEAST:
            return None
        begun, now = median(self._first_losses[:FIRST]), median(self._losses)
        if now < begun - FALLEN * abs(begun):
            return None
        return (
            f"the loss, {loss(now)}, has not fallen in {plural(step, 'step')}: often a learning "
            "rate too small, labels that do not belong to their samples, or weights that are frozen"
        )


def _deviation(values: Collection[float]) -> float:
    """Estimate a standard deviation by the median of absolute deviations (normal: 1.48 times)."""
    middle = median(values)
    return 1.48 * median(abs(value - middle) for value in values)
