"""Hold what a run consists of, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import final

from trainer.config.run_config import RunConfig
from trainer.core.stateful import State, Stateful
from trainer.parallel.base import Parallel
from trainer.report.reporter import Reporter
from trainer.training.batches import Feed
from trainer.training.best_metric import BEST, STOP, BestMetric
from trainer.training.checkpointing import Checkpointer
from trainer.training.evaluation import HeldOut
from trainer.training.model_flops import ModelFlops
from trainer.training.step import NO_LOSS_TERMS, NOT_FINITE, StepReport
from trainer.training.window import StepContext


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, composed once."""

    config: RunConfig
    context: StepContext
    feed: Feed
    held_out: Mapping[str, HeldOut]  # by name; the run's own part has none
    reporter: Reporter
    checkpointer: Checkpointer  # saves checkpoints, and may add a cadence in seconds. Collective.
    was_asked: Callable[[], bool]  # whether a signal asked this rank to stop
    # Of the model; None on ranks that report nothing, and where they are not counted
    flops: ModelFlops | None
    progress: Progress
    # Lends the model as evaluations are to have it. Collective.
    evaluating: Callable[[Parallel, Feed], AbstractContextManager[None]]
    after_evaluation: Callable[[Run], None]  # looks further at the model. Collective.
    own: Mapping[str, Stateful] = field(default_factory=dict)  # parts that the config asks for

    @property
    def best(self) -> BestMetric | None:
        """The metric by which a checkpoint is kept."""
        return self._followed(BEST)

    @property
    def stopping(self) -> BestMetric | None:
        """The metric that ends the run when it gets no better."""
        return self._followed(STOP)

    @property
    def no_better(self) -> str | None:
        """Why the run ends before its last step; None while `stop.metric` gets better."""
        followed, stop = self.stopping, self.config.stop
        if followed is None or followed.num_since < stop.patience:
            return None
        return f"stop.metric={stop.metric}: {followed.without_better}"

    def _followed(self, name: str) -> BestMetric | None:
        part = self.own.get(name)
        return part if isinstance(part, BestMetric) else None


@final
@dataclass(kw_only=True)
class Progress(Stateful):
    """How far the loop has come."""

    step: int = 0  # optimizer steps taken, from the start of the run
    epochs: float = 0.0  # that were over where the last step began
    total_tokens: int = 0  # real input positions consumed, from the start of the run
    # The last one's metrics by name, made at step `evaluated_at`
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    saved_at: int | None = None  # step of the newest checkpoint
    failures: int = 0  # steps in a row, up to the last one, that were not finite
    taken: int = 0  # optimizer steps taken in this process
    # Whether a step had a loss term; taken for granted of steps of other processes
    has_terms: bool = False
    peak_bytes: int = 0  # the most memory that any rank has had in this process

    def __post_init__(self) -> None:
        """Take it for granted that steps before this process had a loss term."""
        self.has_terms |= self.step > 0

    def state(self) -> State:
        """See the base class."""
        return {"tokens": self.total_tokens, "failures": self.failures, "epochs": self.epochs}

    def load(self, state: State) -> None:
        """See the base class."""
        self.total_tokens, self.failures = int(state["tokens"]), int(state["failures"])
        self.epochs = float(state.get("epochs", 0.0))

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self.step = report.batch.step
        self.total_tokens += report.batch.num_tokens
        self.failures = self.failures + 1 if report.skipped == NOT_FINITE else 0
        self.taken += 1
        self.has_terms |= report.skipped != NO_LOSS_TERMS
