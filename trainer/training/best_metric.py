"""Follow a metric over evaluations: which is the best, and for how many none was better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, final

from trainer.config.messages import did_you_mean_name
from trainer.config.metric_mode import Mode, mode_of
from trainer.core.errors import ConfigError
from trainer.core.format import figure_name, plural
from trainer.core.stateful import State, Stateful

BEST, STOP = "best", "stop"
"""Names of such parts in a checkpoint."""


@final
@dataclass(kw_only=True)
class BestMetric(Stateful):
    """The best value of a metric so far."""

    key: str  # that names the metric: `checkpoint.best`, `stop.metric`
    metric: str  # as in metrics.jsonl: `eval_loss`
    mode: Literal["min", "max"]
    min_delta: float = 0.0  # by more than which a value has to be better
    patience: int = 0  # evaluations without a better one, after which a run ends that stops by it
    value: float | None = None  # the best; None before the first
    step: int = 0  # after which it was found
    seen_at: int = -1  # step of the last evaluation
    num_since: int = 0  # evaluations since the best

    @classmethod
    def of(
        cls, key: str, metric: str, mode: Mode, min_delta: float = 0.0, patience: int = 0
    ) -> Self:
        """Follow a metric, whose direction follows from its name where nobody says it."""
        known = mode_of(key, metric, mode, "checkpoint.mode")
        return cls(key=key, metric=metric, mode=known, min_delta=min_delta, patience=patience)

    def check(self, means: Mapping[str, float]) -> None:
        """Refuse a metric that an evaluation does not give."""
        names = [*map(figure_name, means)]
        if self.metric not in names:
            near = did_you_mean_name(self.metric, names) or f" Evaluations give {', '.join(names)}"
            raise ConfigError(f"{self.key}={self.metric}: no evaluation of this run has it.{near}")

    def see(self, step: int, means: Mapping[str, float]) -> bool:
        """Take an evaluation, once; gives whether it is the best. What is not a number never is."""
        if step == self.seen_at:
            return False
        self.check(means)
        self.seen_at, value = step, means[self.metric.removeprefix("eval_")]
        # What is not a number differs from itself, and compares as false below.
        is_better = value == value  # noqa: PLR0124
        if self.value is not None:
            gain = self.value - value
            if self.mode == "max":
                gain = -gain
            is_better = gain > self.min_delta
        self.num_since += 1
        if is_better:
            self.value, self.step, self.num_since = value, step, 0
        return is_better

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.metric} was never a number"
        return f"{self.metric} was best at step {self.step}: {self.value:.4f}"

    @property
    def found(self) -> dict[str, str | float | None]:
        """What result.json holds."""
        return {"metric": self.metric, "value": self.value, "step": self.step}

    @property
    def without_better(self) -> str:
        """Say for how long none was better, and by how much it had to be."""
        count = plural(self.num_since, "evaluation")
        if not self.min_delta or self.value is None:
            return f"{count} without a better one; {self}"
        asked = f"an improvement of more than stop.min_delta={self.min_delta:g}"
        return f"{count} without {asked} over {self.value:.4f} at step {self.step}"

    def state(self) -> State:
        """See the base class."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": self.value,
            "step": self.step,
            "seen_at": self.seen_at,
            "num_since": self.num_since,
        }

    def load(self, state: State) -> None:
        """See the base class; another metric begins anew."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value = None
            if state["value"] is not None:
                self.value = float(state["value"])
            self.step, self.seen_at = int(state["step"]), int(state["seen_at"])
            self.num_since = int(state["num_since"])
