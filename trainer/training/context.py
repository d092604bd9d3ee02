"""Hold what a step needs: a run's data and model, laid out over ranks, with an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from trainer.accumulate.loss_scale import LossScale
from trainer.accumulate.model_state import ModelState
from trainer.accumulate.rollback import Snapshot
from trainer.core.stateful import Stateful
from trainer.core.world import World
from trainer.models.bind import Casts
from trainer.objectives.base import Objective
from trainer.parallel.base import Parallel
from trainer.training.batches import PlannedBatch
from trainer.training.data import Data, HeldOut
from trainer.training.model import Model

EachDivisors = Sequence[Mapping[str, float]]
"""What the loss sums of each micro-batch of this rank are divided by."""

Measured = dict[str, float | Tensor]
"""0-d sums over micro-batches by name."""

Measuring = Callable[
    ["StepContext", PlannedBatch, EachDivisors, Measured], AbstractContextManager[None]
]
"""Measures the last pass over this rank's micro-batches, around it; waits for no device.

`Measured` takes sums by names, the same on every rank, when the block ends. Sums over ranks reach
`see_gradient` of the parts."""

MoreFigures = Callable[
    ["StepContext", Mapping[str, HeldOut], Callable[[], bool]], Mapping[str, Mapping[str, float]]
]
"""Gives figures of an evaluation by the names of parts; see `Feature.figures`."""


@final
@dataclass(frozen=True, kw_only=True)
class StepState:
    """What of a model moves in a step beside its weights."""

    snapshot: Snapshot  # of the declared state that forwards write, as it was before the step
    # What forwards write and checkpoints save, the same on all ranks after a step
    model_state: ModelState
    casts: Casts  # of weights, which autocast keeps over the micro-batches of a step

    @classmethod
    def of(cls, parallel: Parallel, objective: Objective, world: World) -> Self:
        """Follow a model that is laid out."""
        module = parallel.module
        return cls(
            snapshot=Snapshot(module, objective),
            model_state=ModelState(module, world, is_ordered=parallel.is_ordered),
            casts=Casts(module, by_value=True),
        )


@final
@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A run's data and model, and what there is of them once the model is laid out over ranks."""

    data: Data
    model: Model
    world: World
    parallel: Parallel  # the model, laid out
    state: StepState
    terms: tuple[str, ...]  # every name the objective weighs
    optimizer: torch.optim.Optimizer
    base_lrs: tuple[float, ...]  # of each parameter group, at factor 1
    loss_scale: LossScale | None = None  # of a run in fp16
    # Sets what of the optimizer follows the size of a step; also given what scales its rates
    follow_batch: Callable[[int, float], None] | None = None
    parts: Sequence[Stateful] = ()  # those that follow every update, in order
    measuring: Sequence[Measuring] = ()
    figures: Sequence[MoreFigures] = ()  # beside those of sums, called in every evaluation
    # Called with the global batch and the error, before memory is freed
    on_out_of_memory: Callable[[PlannedBatch, BaseException], None] | None = None

    @property
    def losses(self) -> list[str]:
        """Those of `terms` that are no metrics."""
        metrics = self.model.objective.metric_names
        losses = list[str]()
        for name in self.terms:
            if name not in metrics:
                losses.append(name)
        return losses
