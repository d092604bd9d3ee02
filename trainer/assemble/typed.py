"""Build the parts of a run that its config names: before data and model are there, or by these.

What nobody typed of an optimizer follows from what the model's first weights are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainer.assemble.data_sets import RunTokenizer
from trainer.assemble.features import Features, StepShape
from trainer.assemble.instantiate import (
    arguments_of,
    check_components,
    construct,
    look_up,
    run_features,
)
from trainer.assemble.objective import Chosen, typed_objective
from trainer.config.components import SHARED, Component
from trainer.config.messages import show
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.stateful import Stateful
from trainer.models.facts import facts_of
from trainer.objectives.base import Objective
from trainer.optim.optimizers import OptimizerSpec, OwnOptimizer, TrainingJob
from trainer.optim.schedules import OwnScheduler, Schedule
from trainer.plan.batch_size import BatchSize
from trainer.plan.cut import Cut


@final
@dataclass(frozen=True, kw_only=True)
class TypedParts:
    """What a config asks for, before anything is read.

    Reading data may take minutes: what can be refused without them is refused before.
    """

    tokenizer: RunTokenizer
    objective: Chosen | None  # None where the model is to say which one it is
    spec: OptimizerSpec  # with the settings of a model from scratch, where none are typed
    schedule: Schedule
    cut: Cut
    features: Features

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build them; all classes that the config names are looked up first."""
        check_components(config)
        tokenizer, features = RunTokenizer(config), run_features(config)
        cut = construct(config.accum, "accum", Cut, config.trust)
        if config.activation_checkpointing == "auto" and not cut.is_tunable:
            raise ConfigError("activation_checkpointing=auto: needs accum=auto")
        if config.deterministic == "layout":  # the same cut for all numbers of ranks
            if (same := cut.for_any_ranks) is None:
                text = "needs fixed micro-batches; type accum=fixed accum.micro=8"
                raise ConfigError(f"deterministic=layout: {text}")
            cut = same
        for key, feature in features.by_key.items():
            if feature.accepts_cut and cut.chooses_sizes:
                text = "type accum=fixed accum.micro=N, where N is batch.global for the whole step"
                name = config.features[key].label
                raise ConfigError(f"{key}={name}: depends on the micro-batch size; {text} at once")
        return cls(
            tokenizer=tokenizer,
            objective=typed_objective(config, tokenizer),
            spec=typed_optimizer(config, _settings(config, "scratch")),
            schedule=_typed_schedule(config),
            cut=cut,
            features=features,
        )

    def adjusting(self, largest: int, *, is_padded: bool) -> Callable[[nn.Module], None]:
        """Give what changes how a model computes, where a step has so many samples at the most."""
        is_stated = "micro_batch" in self.cut.couplings
        shape = StepShape(largest=largest, is_stated=is_stated, is_padded=is_padded)
        return partial(self.features.adjust, shape=shape)


def batch_sizes(config: RunConfig) -> BatchSize:
    """Build what sizes the steps; accum.micro and accum.steps give a `batch.global` of null."""
    size = {"global_batch": config.batch.global_batch, "unit": config.batch.unit}
    return construct(config.batch, "batch", BatchSize, config.trust, size)


def _typed_schedule(config: RunConfig) -> Schedule:
    """Build the schedule of a config, and refuse one that does not fit into its steps."""
    kind = look_up(config.scheduler, "scheduler", config.trust)
    if not (inspect.isclass(kind) and issubclass(kind, LRScheduler)):
        schedule = construct(config.scheduler, "scheduler", Schedule, config.trust)
        # Else they are counted once data are read.
        if config.steps is not None:
            schedule.check(config.steps)
        return schedule
    options = arguments_of(config.scheduler, "scheduler", config.trust)
    shared = dict[str, Any]()
    # What all schedules of ours take, PyTorch's own do not: it is applied around them.
    for name in SHARED["scheduler"]:
        if name in options:
            shared[name] = options.pop(name)
    return OwnScheduler(kind=kind, options=options, **shared)


@final
@dataclass(frozen=True, kw_only=True)
class ChosenOptimizer:
    """The optimizer of a run."""

    spec: OptimizerSpec
    component: Component  # its class and all of its arguments, as if they had been typed
    by_job: Mapping[str, Any]  # the arguments that nobody typed, and that follow from the job
    why: str  # the reason for those
    reference: OptimizerSpec | None = None  # as it is at `scheduler.reference_batch`, if it differs


def typed_optimizer(config: RunConfig, given: Mapping[str, Any]) -> OptimizerSpec:
    """Build the optimizer of a config; `given` are arguments that the config leaves open."""
    kind = look_up(config.optimizer, "optimizer", config.trust)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
        return OwnOptimizer.of(kind, arguments_of(config.optimizer, "optimizer", config.trust))
    return construct(config.optimizer, "optimizer", OptimizerSpec, config.trust, given)


def fitting_optimizer(
    config: RunConfig, module: nn.Module, recorded: Mapping[str, Any], objective: Objective
) -> ChosenOptimizer:
    """Build the optimizer with the settings that suit a model where none are typed.

    A run that goes on has those that it began with, by the contract of its checkpoint, `recorded`;
    it is empty where a run begins.
    """
    job, why = _job(config, module)
    given = {**_settings(config, job)}
    share = objective.rate_share
    if share != 1 and job != "scratch" and "lr" in given:
        given["lr"] = float(f"{given['lr'] * share:.6g}")  # as one would type it
        why = f"{why}; {type(objective).__name__} takes {share:g} of the usual rate"
    if recorded.get("optimizer._target_") == config.optimizer.target:
        why = "as the run began"
        given = {name: recorded.get(f"optimizer.{name}") for name in given}
    params = config.optimizer.params
    by_job = dict[str, Any]()
    for name, value in given.items():
        if value is not None and params.get(name) is None:
            by_job[name] = value
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
    size = 2 * batch
    if sizes.is_constant:
        size = sizes.global_batch
    factor = schedule.batch_factor(size)
    spec = chosen.spec.for_batch(size / batch, factor)
    if spec == chosen.spec and size != batch:
        name, rule = type(spec).__name__, schedule.scale
        raise ConfigError(f"{key}: scheduler.scale={rule} changes nothing of {name}; leave it out")
    if sizes.is_constant:
        return replace(chosen, spec=spec, reference=chosen.spec)
    return chosen


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
