"""Define what a step is made of: the parts that are composed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch

from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.model_state import ModelState
from trainer.accumulate.normalizer import Kind
from trainer.accumulate.rollback import Snapshot
from trainer.core.world import World
from trainer.objectives.base import Objective
from trainer.optim.schedules import Schedule
from trainer.parallel.base import Parallel
from trainer.parallel.sync import Exact, SyncPolicy


@final
@dataclass(frozen=True, kw_only=True)
class Kit:
    """Everything a step needs, composed once.

    Attributes:
        terms: every name the objective weighs.
        lr: learning rate at factor 1, of parameters in no group of their own.
        base_lrs: that of each parameter group.
        clip_norm: largest 2-norm of the step's gradient; None leaves it as it is.
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
