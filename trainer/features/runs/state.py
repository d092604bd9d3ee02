"""Read how far a run came, from its small files and the end of metrics.jsonl.

Whatever is missing, torn or a stranger's counts as not known.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard, final, get_args

from trainer.config.metric_mode import mode_of
from trainer.core.errors import ConfigError
from trainer.core.format import loss, number
from trainer.core.run_folder import RunFolder, RunState, is_locked
from trainer.core.urls import url_of
from trainer.report.journal import MOST_STEPS, Entry, is_number, read_end


@final
@dataclass(frozen=True)
class HeldOutFigure:
    """The held-out figure of a run: the best value of `checkpoint.best`, else the last loss."""

    metric: str
    value: float | None
    is_max: bool  # whether more is better

    def __str__(self) -> str:
        return "-" if self.value is None else loss(self.value)

    def by_rank(self) -> tuple[bool, str, float]:
        """Give what runs are sorted by: by metric, the best first; those without a value last."""
        value = self.value or 0.0
        return self.value is None, self.metric, -value if self.is_max else value


def word_of_state(run: RunFolder) -> str:
    """Give its state in a word: `killed` where its process is gone, `-` where it says nothing."""
    state = run.record(RunFolder.STATUS).get("state")
    # Of a run on another machine nobody here sees the lock.
    is_elsewhere = url_of(run.path) is not None and not (run.path / RunFolder.LOCK).exists()
    if state == "running" and not is_elsewhere and not is_locked(run.path):
        return "killed"
    # By its search
    if str(run.record(RunFolder.RESULT).get("stopped")).startswith("pruned:"):
        return "pruned"
    return str(state) if state in get_args(RunState) else "-"


def last_step_of(run: RunFolder) -> int:
    """Give its last step; 0 before the first."""
    status = run.record(RunFolder.STATUS)
    step = status.get("step")
    if status.get("state") == "completed" and _is_count(step):
        return step
    return read_end(run.path / RunFolder.METRICS)[0]


def progress_of(run: RunFolder) -> str:
    """Write its last step, and of how many."""
    steps, last = run.record(RunFolder.PLAN).get("steps"), number(last_step_of(run))
    return f"{last}/{number(steps)}" if _is_count(steps) else last


def held_out_of(run: RunFolder) -> HeldOutFigure:
    """Give its held-out figure; of a run that did not complete, as far as it came."""
    best, mode = run.word("checkpoint.best"), run.word("checkpoint.mode")
    metric, value = best or "eval_loss", None
    if mode not in ("min", "max"):
        mode = "min"
        with suppress(ConfigError):
            mode = mode_of("", metric, "auto", "")
    if run.record(RunFolder.STATUS).get("state") == "completed":
        result: Any = run.record(RunFolder.RESULT)
        if best is not None:
            result = result.get("best")
        # A stranger may have written the file.
        if isinstance(result, dict):
            value = result.get("value" if best else metric)
    if not is_number(value):
        value = _in_journal(read_end(run.path / RunFolder.METRICS)[1], metric, best and mode)
    return HeldOutFigure(metric, value, mode == "max")


def _in_journal(evaluations: list[Entry], metric: str, mode: str | None) -> float | None:
    """Find the largest or least value of a metric; where none is better, the last."""
    values = list[float]()
    for entry in evaluations:
        if is_number(value := entry.get(metric)):
            values.append(value)
    if not values:
        return None
    if mode is None:
        return values[-1]
    return max(values) if mode == "max" else min(values)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MOST_STEPS
