"""Define what a step is made of: the parts that are composed once, and the batch it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, final

import torch

from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.model_state import ModelState
from trainer.accumulate.normalizer import Kind
from trainer.accumulate.rollback import Snapshot
from trainer.core.micro_batch import MicroBatch
from trainer.core.world import World
from trainer.objectives.base import Objective
from trainer.optim.schedules import Schedule
from trainer.parallel.base import Parallel
from trainer.parallel.sync import Exact, SyncPolicy


class StepBatch(Protocol):
    """One global batch, cut, with this rank's micro-batches at hand."""

    @property
    def step(self) -> int:
        """The step it belongs to, from 1."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]:
        """This rank's micro-batches."""

    def largest_sample(self) -> tuple[int, int]:
        """Name the sample that needs most memory: its id and its length in tokens."""


Batch = TypeVar("Batch", bound=StepBatch)


class Replanner(Protocol[Batch]):
    """Cuts a global batch smaller after an allocation failed."""

    def smaller(self, batch: Batch) -> Batch | None:
        """Cut the same global batch into smaller micro-batches; None at one sample each."""

    def smaller_setting(self, batch: Batch) -> str | None:
        """Name a setting that cuts smaller than this; None at one sample each."""


@final
@dataclass(frozen=True, kw_only=True)
class Kit:
    """Everything a step needs, composed once.

    Attributes:
        terms: every name the objective weighs.
        lr: learning rate at factor 1, of parameters in no group of their own.
        base_lrs: that of each parameter group.
        clip_norm: largest 2-norm of the step's gradient; None leaves it as it is.
        retry_with: the setting of a sync policy that fits and can replay a step, where this one
            cannot.
        snapshot: of the declared state that forwards write, as it was before the step.
        model_state: what forwards write and checkpoints save, the same on all ranks after a step.
    """

    model: Parallel
    objective: Objective
    terms: tuple[str, ...]
    strategy: GradientStrategy
    sync: SyncPolicy
    normalizer: Kind
    optimizer: torch.optim.Optimizer
    lr: float
    base_lrs: tuple[float, ...]
    schedule: Schedule
    total_steps: int
    clip_norm: float | None
    world: World
    retry_with: str | None = None

    snapshot: Snapshot = field(init=False)
    model_state: ModelState = field(init=False)

    def __post_init__(self) -> None:
        is_ordered = isinstance(self.sync, Exact)
        state = ModelState(self.model.module, self.world, is_ordered=is_ordered)
        object.__setattr__(self, "snapshot", Snapshot(self.model.module, self.objective))
        object.__setattr__(self, "model_state", state)

    @property
    def losses(self) -> list[str]:
        """Those of `terms` that are no metrics."""
        return [name for name in self.terms if name not in self.objective.metric_names]

    @property
    def metrics(self) -> list[str]:
        """The other ones."""
        return [name for name in self.terms if name in self.objective.metric_names]
