"""Hold what a run consists of once it is open, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import final

import numpy as np

from trainer.core.stateful import State, Stateful
from trainer.parallel.base import Parallel
from trainer.plan.cut import IntArray
from trainer.report.reporter import Reporter
from trainer.training.batches import Feed
from trainer.training.best_metric import BEST, STOP, BestMetric
from trainer.training.checkpointing import Checkpointer
from trainer.training.context import StepContext
from trainer.training.step import NO_LOSS_TERMS, NOT_FINITE, StepReport


@final
@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run whose step, records and checkpoints are there."""

    context: StepContext
    feed: Feed
    reporter: Reporter
    checkpointer: Checkpointer  # saves checkpoints, and may add a cadence in seconds. Collective.
    was_asked: Callable[[], bool]  # whether a signal asked this rank to stop
    # Of the model; None on ranks that report nothing, and where they are not counted
    flops: ModelFlops | None
    progress: Progress
    # Lends the model as evaluations are to have it. Collective.
    evaluating: Callable[[Parallel, Feed], AbstractContextManager[None]]
    after_evaluation: Callable[[OpenRun], None]  # looks further at the model. Collective.

    save_every: float | str | None  # in steps, or in epochs; None is never
    evaluate_every: float | str | None
    evaluate_first: bool  # whether the model is evaluated before its first step
    most_failures: int  # steps in a row that are not finite, after which the run ends
    metrics: Mapping[str, BestMetric]  # those that evaluations are to give

    @property
    def best(self) -> BestMetric | None:
        """The metric by which a checkpoint is kept."""
        return self.metrics.get(BEST)

    @property
    def stopping(self) -> BestMetric | None:
        """The metric that ends the run when it gets no better."""
        return self.metrics.get(STOP)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.context.data.total_steps

    @property
    def no_better(self) -> str | None:
        """Why the run ends before its last step; None while `stop.metric` gets better."""
        followed = self.stopping
        if followed is None or followed.num_since < followed.patience:
            return None
        return f"{followed.key}={followed.metric}: {followed.without_better}"


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


@final
@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of forward and backward of one model, and what the devices can do."""

    per_token: float
    per_pair: float = 0.0  # of tokens of one sample
    peak: float | None = None  # of all ranks' devices, per second; None where nobody knows

    def speed(self, lengths: IntArray, seconds: float) -> dict[str, float]:
        """Give the figures of a step that took so long, over samples of so many tokens each."""
        tokens = lengths.astype(np.float64)
        flops = self.per_token * float(tokens.sum()) + self.per_pair * float((tokens**2).sum())
        each = flops / seconds
        return {"model_flops_per_second": each} | ({"mfu": each / self.peak} if self.peak else {})
