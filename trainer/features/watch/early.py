"""Watch losses and gradient norms for spikes, and for a loss that does not fall at the beginning.

It reads what is written anyway, and says something rarely: a model that learns should never be
spoken of. Both figures are compared with the median of the last steps, in standard deviations. The
median of absolute deviations estimates those, which one odd step does not move.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, final

from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.config.amounts import warmup_steps
from trainer.config.messages import line
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.format import loss, plural, rate
from trainer.core.rows import Row, row
from trainer.core.run_folder import RunFolder
from trainer.core.stateful import Stateful
from trainer.report.run_status import to_go_on

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

    def __init__(
        self,
        *,
        warmup_steps: int = 0,
        keeps_samples: bool = False,
        last_step: int = 0,
        config: RunConfig | None = None,
    ) -> None:
        self._beginning, self._keeps_samples = warmup_steps + BEGINNING, keeps_samples
        # Without a config nobody is told how to go past a spike.
        self._last_step, self._config = last_step, config
        self._losses, self._norms = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        # What this process began with
        self._first_losses, self._first_norms = list[float](), list[float]()
        self._began_at = 1
        self._silent_until = 0
        # Of the spike that is not over yet
        self._first_odd: int | None = None

    def planned(self, run_plan: RunPlan) -> EarlyWatch:
        """See the base class; the length of the warm-up is known by now."""
        run, last_step = run_plan.run, run_plan.run.data.total_steps
        can_skip = not isinstance(run.data.order.sizes, Stateful)
        return EarlyWatch(
            warmup_steps=warmup_steps(run.model.schedule.warmup, last_step),
            keeps_samples=run.config.log.samples,
            last_step=last_step,
            config=run.config if can_skip else None,
        )

    def check(self, run: Run) -> None:
        """See the base class."""
        order, total = run.data.order, run.data.total_steps
        text = None
        if order.skips and isinstance(order.sizes, Stateful):
            text = "decides on sizes while it runs, so nobody knows what such steps had"
            text = f"batch={run.config.batch.label} {text}; leave it out"
        elif order.skips and order.skips[-1][0] > total + sum(b - a + 1 for a, b in order.skips):
            text = f"behind the last step, {total}; leave them out"
        if text is not None:
            raise ConfigError(line("data.skip_steps", run.config.data.skip_steps, text))

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """See the base class."""
        skips = [*run_plan.run.config.data.skip_steps]
        text = f"samples of steps {', '.join(skips)}, of the data in their first order"
        return [row("passed over", text, group="asked", skip_steps=skips)] if skips else []

    def remark(self, entry: Mapping[str, Any], ids: Sequence[int], folder: Path) -> str | None:
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
        odd = self._odd(value, norm)
        is_over = odd is None or step == self._last_step
        if self._first_odd is not None and is_over:
            found, self._first_odd = self._way_past(step - (odd is None), folder), None
        elif odd is not None and step >= self._silent_until:
            self._first_odd, self._silent_until = step, step + QUIET_STEPS
            more = f", ... of {len(ids)}" if len(ids) > SHOWN_IDS else ""
            where = "all in samples.jsonl" if self._keeps_samples else "log.samples=true lists all"
            found = f"{odd}; samples {', '.join(map(str, ids[:SHOWN_IDS]))}{more} ({where})"
        self._losses.append(value)
        self._norms.append(norm)
        return found

    def _odd(self, value: float, norm: float) -> str | None:
        """Say that loss or norm is far above what it was; None where neither is."""
        if len(self._losses) < LEAST:
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
        return (
            f"{now} is far above that of the {len(self._losses)} steps before, {usual}: "
            "often a learning rate too high, a warm-up too short, or bad samples"
        )

    def _way_past(self, last: int, folder: Path) -> str | None:
        """Say how to go back behind the spike, that ends with a step, and past its samples."""
        first, before = self._first_odd or 0, 0
        for step in RunFolder(folder).steps():
            if step < first:
                before = step
        if self._config is None or not before:
            return None
        name = f"name={self._config.name or 'run'}-past"
        words = f"step={before} data.skip_steps={before + 1}-{last} {name}"
        where = f"the spike of step {first} is over"
        if last > first:
            where = f"the spike of steps {first} to {last} is over"
        how = "to go back behind it and past its samples"
        return f"{where}; {how}: {to_go_on(self._config, folder)} {words}"

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
