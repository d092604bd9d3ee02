"""Define the second stage of a run: what computes the gradient of a step, and makes it an update.

It is the model with its loss and its rules, before it is compiled, laid out over ranks, or given an
optimizer. Whatever computes takes it: steps, tuning, evaluations, verification.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import nn

from trainer.accumulate.base import GradientStrategy, WeightUnit
from trainer.accumulate.sum import Sum
from trainer.core.coupling import NONE, Coupling
from trainer.core.tensors import dtype_word
from trainer.core.world import World
from trainer.models.bind import AUTOCAST, bind
from trainer.models.first_weights import FirstWeights, any_values
from trainer.objectives.base import ModelCall, Objective
from trainer.optim.optimizers import OptimizerSpec
from trainer.optim.schedules import Constant, Schedule
from trainer.parallel.setup import ParallelSetup
from trainer.parallel.sync import Deferred
from trainer.plan.order import Cursor, Order

ONE_RANK = ParallelSetup(mode="none", replicas=1, sync=Deferred())


@final
@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, its loss, and how it is updated."""

    # On its device, neither compiled nor wrapped. To be sharded, its parameters are on the meta
    # device.
    module: nn.Module
    weights: FirstWeights | None = None  # what parameters on the meta device begin with
    precision: str = "fp32"  # the word that `precision` became
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    objective: Objective  # what turns the model's outputs into loss sums
    normalizer: WeightUnit = "tokens"
    # How the gradients of micro-batches become the step's
    strategy: GradientStrategy = field(default_factory=Sum)
    coupling: Coupling = NONE  # of the samples of a step, by model, objective and normalizer
    # How ranks are used; under `sync=auto` with a policy that the plan may change
    setup: ParallelSetup = ONE_RANK

    spec: OptimizerSpec  # builds the optimizer, once the model is laid out
    schedule: Schedule = field(default_factory=Constant)  # factor of every learning rate, by step
    clip_norm: float | None = None  # largest 2-norm of the step's gradient; None leaves it as it is

    @cached_property
    def call(self) -> ModelCall:
        """The module, bound to the run's precision."""
        return self.bind(self.module)

    @property
    def product_word(self) -> str:
        """The word of what matrix products compute in: without autocast that of most weights."""
        sizes = Counter[str]()
        for parameter in self.module.parameters():
            sizes[dtype_word(parameter.dtype)] += parameter.numel()
        [(word, _)] = sizes.most_common(1) or [("", 0)]
        # Of wider weights and integers no card says a speed.
        return self.precision if self.precision in AUTOCAST or word not in AUTOCAST else word

    def bind(self, module: nn.Module) -> ModelCall:
        """Bind a module, such as a copy of the run's, to the run's precision."""
        return bind(module, autocast=AUTOCAST.get(self.precision), device_type=self.device.type)

    def trial_values(self, world: World) -> AbstractContextManager[None]:
        """Lend the main rank values for a trial, where a model in shards has none yet."""
        is_tried = self.weights is not None and world.is_main
        return any_values(self.module, self.device) if is_tried else nullcontext()

    def lr_scale(self, order: Order, at: Cursor) -> float:
        """What the size of the step that begins at a position multiplies every rate by."""
        own = order.sizes.lr_factor(order.position(at))
        return self.schedule.batch_factor(order.size_of(at)) * own

    @property
    def adds_up(self) -> bool:
        """Whether a micro-batch has one backward, by which it adds its own samples' gradient."""
        is_single = self.strategy.single_backward and not self.strategy.before
        return is_single and self.coupling.kind != "batch" and not self.coupling.joins_ranks
