"""Resolve how the BatchNorm layers of a run normalise, and refuse what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from torch import nn

from trainer.assemble.instantiate import construct
from trainer.config.run_config import RunConfig, stated_coupling
from trainer.core.coupling import Coupling, strictest
from trainer.core.errors import ConfigError
from trainer.core.norms import model_coupling, normalizes_batch
from trainer.models.batch_norm import BatchNormMode, StepShape, layers_of, use_mode
from trainer.plan.cut import Cut
from trainer.plan.lengths import Lengths
from trainer.plan.order import Order


@final
@dataclass(frozen=True, kw_only=True)
class RunBatchNorm:
    """How the BatchNorm layers of a run normalise."""

    typed: BatchNormMode
    shape: StepShape

    def adjust(self, module: nn.Module) -> None:
        """Let a mode normalise for the layers of a model, where it has any."""
        if any(map(normalizes_batch, module.modules())):
            use_mode(module, self.typed.resolved(self.shape))

    def check(self, config: RunConfig, module: nn.Module, order: Order, total_steps: int) -> None:
        """Refuse a mode that does not fit the model, or the sizes of the steps."""
        layers, name = layers_of(module), config.batchnorm.name or config.batchnorm.target
        if not layers and self.typed.needs_layers:
            kind = type(module).__name__
            raise ConfigError(
                f"batchnorm={name}: {kind} has no BatchNorm that normalises in training: leave it "
                "out, or type batchnorm=auto"
            )
        tracked = [each for each in layers if each.running_mean is not None]
        has_none = not tracked or tracked[0].mode.estimating is None
        if config.batchnorm.precise is not None and has_none:
            why = f"batchnorm={name} estimates none again"
            why = why if tracked else "the model has no BatchNorm with running statistics"
            raise ConfigError(
                f"batchnorm.precise={config.batchnorm.precise}: {why}: type batchnorm.precise=null"
            )
        if not layers:
            return
        coupling = layers[0].coupling
        if config.deterministic == "layout" and coupling.kind != "none":
            raise ConfigError(
                "deterministic=layout: the running statistics of BatchNorm are sums over ranks, of "
                "other bits for other numbers of them: type batchnorm=frozen or deterministic=true"
            )
        if coupling.kind == "group":
            _refuse_lone_sample(coupling.size, order, total_steps)


def resolve_batch_norm(config: RunConfig, order: Order, cut: Cut, lengths: Lengths) -> RunBatchNorm:
    """Build what `batchnorm` names, for the steps of a run."""
    shape = StepShape(
        largest=order.most_samples,
        is_stated="micro_batch" in cut.couplings,
        is_padded=not lengths.is_constant,
    )
    mode = construct(config.batchnorm, "batchnorm", BatchNormMode, config.trust)
    return RunBatchNorm(typed=mode, shape=shape)


def couple(
    config: RunConfig, batch_norm: RunBatchNorm, module: nn.Module, objective: Coupling
) -> Coupling:
    """Say how far the samples of a step depend on each other, by all that couples them."""
    found = model_coupling(module)
    found = replace(found, warning="") if batch_norm.typed.accepts_statistics else found
    return strictest(found, stated_coupling(config), objective)


def step_sizes(order: Order, total_steps: int) -> set[int]:
    """Count the samples of all steps; where tokens are counted, as if samples had as many."""
    if not order.sizes.is_constant:
        return {b.samples - a.samples for a, b in pairwise(order.walk(total_steps))}
    counts = {whole := len(order.batch_of(order.sizes.largest))}
    if order.keeps_tail and total_steps >= order.steps_per_epoch:
        counts.add(order.num_samples % whole or whole)
    return counts


def _refuse_lone_sample(size: int, order: Order, total_steps: int) -> None:
    """Refuse groups of one sample, which has no variance: the last of a step, or of an epoch."""
    # In tokens too: where groups are normalised, all samples have as many.
    if lone := [count for count in step_sizes(order, total_steps) if count % size == 1]:
        raise ConfigError(
            f"batchnorm.group={size}: a step of {max(lone)} samples leaves a group of one sample, "
            "which has no variance: type another batchnorm.group or size of steps, or, for the end "
            "of an epoch, batch.tail=drop"
        )
