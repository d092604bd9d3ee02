"""Choose the rules of the update: the optimizer's settings, and the schedule of its rates.

What nobody typed follows from what the model's first weights are. Lengths of a schedule that are
typed in samples or tokens become steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainer.assemble.instantiate import arguments_of, construct, look_up
from trainer.config.components import SHARED, Component
from trainer.config.messages import show
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.stateful import Stateful
from trainer.models.facts import facts_of
from trainer.optim.optimizers import OptimizerSpec, OwnOptimizer, TrainingJob
from trainer.optim.schedules import OwnScheduler, Schedule
from trainer.plan.batch_size import BatchSize


@final
@dataclass(frozen=True, kw_only=True)
class ChosenOptimizer:
    """The optimizer of a run."""

    spec: OptimizerSpec
    component: Component  # its class and all of its arguments, as if they had been typed
    by_job: Mapping[str, Any]  # the arguments that nobody typed, and that follow from the job
    why: str  # the reason for those
    reference: OptimizerSpec | None = None  # as it is at `scheduler.reference_batch`, if it differs


def typed_optimizer(config: RunConfig, given: Mapping[str, Any] | None = None) -> OptimizerSpec:
    """Build the optimizer of a config.

    `given` are arguments that the config leaves open; None for those of a model from scratch.
    """
    kind = look_up(config.optimizer, "optimizer", config.trust)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
        return OwnOptimizer.of(kind, arguments_of(config.optimizer, "optimizer", config.trust))
    given = _settings(config, "scratch") if given is None else given
    return construct(config.optimizer, "optimizer", OptimizerSpec, config.trust, given)


def fitting_optimizer(
    config: RunConfig, module: nn.Module, recorded: Mapping[str, Any]
) -> ChosenOptimizer:
    """Build the optimizer with the settings that suit a model where none are typed.

    A run that goes on has those that it began with, by the contract of its checkpoint, `recorded`;
    it is empty where a run begins.
    """
    job, why = _job(config, module)
    given = _settings(config, job)
    if recorded.get("optimizer._target_") == config.optimizer.target:
        found = {name: recorded.get(f"optimizer.{name}") for name in given}
        given, why = {n: v for n, v in found.items() if v is not None}, "as the run began"
    params = config.optimizer.params
    by_job = {name: value for name, value in given.items() if params.get(name) is None}
    return ChosenOptimizer(
        spec=typed_optimizer(config, by_job),
        component=config.optimizer.model_copy(update={"params": {**params, **by_job}}),
        by_job=by_job,
        why=why,
    )


def with_half_lives(
    chosen: ChosenOptimizer, schedule: Schedule, sizes: BatchSize
) -> ChosenOptimizer:
    """Change betas and weight decay to the global batch, where the schedule asks for it."""
    if not schedule.keep_half_life:
        return chosen
    key, batch = "scheduler.keep_half_life=true", schedule.reference_batch
    assert batch is not None, "which the schedule refuses"
    if isinstance(sizes, Stateful):
        raise ConfigError(f"{key}: needs sizes that are known before the run; leave it out")
    # Where sizes change, the optimizer is built for the reference batch, and set in each step.
    size = sizes.global_batch if sizes.is_constant else 2 * batch
    factor = schedule.batch_factor(size)
    spec = chosen.spec.for_batch(size / batch, factor)
    if spec == chosen.spec and size != batch:
        name, rule = type(spec).__name__, schedule.scale
        raise ConfigError(f"{key}: scheduler.scale={rule} changes nothing of {name}; leave it out")
    return replace(chosen, spec=spec, reference=chosen.spec) if sizes.is_constant else chosen


def _settings(config: RunConfig, job: TrainingJob) -> Mapping[str, Any]:
    """Give what the class of an optimizer declares for a job; most declare nothing."""
    kind = look_up(config.optimizer, "optimizer", config.trust)
    found: Mapping[str, Any] = getattr(kind, "by_job", {}).get(job, {})
    return found


def _job(config: RunConfig, module: nn.Module) -> tuple[TrainingJob, str]:
    """Tell what is done with a model, and why one thinks so."""
    for key, entry in config.model_transforms.items():
        kind = look_up(entry, key, config.trust)
        if getattr(kind, "is_adapter", False):
            return "adapter", f"as {kind.__name__} is an adapter"
    if config.init is not None:
        return "pretrained", f"as the weights are those of {show(config.init)}"
    facts = facts_of(module, config.model.params)
    if facts.source is None:
        return "scratch", "as the weights are drawn from the seed"
    if new := facts.new_head:
        return "new head", f"as the head is new ({new[0]}{', ...' * (len(new) > 1)})"
    return "pretrained", f"as the weights are loaded from {show(facts.source)}"


def typed_schedule(config: RunConfig) -> Schedule:
    """Build the schedule of a config, and refuse one that does not fit into its steps."""
    kind = look_up(config.scheduler, "scheduler", config.trust)
    if not (inspect.isclass(kind) and issubclass(kind, LRScheduler)):
        schedule = construct(config.scheduler, "scheduler", Schedule, config.trust)
        if config.steps is not None:  # else they are counted once data are read
            schedule.check(config.steps)
        return schedule
    options = arguments_of(config.scheduler, "scheduler", config.trust)
    shared = {name: options.pop(name) for name in SHARED["scheduler"] if name in options}
    return OwnScheduler(kind=kind, options=options, **shared)
