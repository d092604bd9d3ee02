"""Build the parts of a run that need neither data nor model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, final

from torch import nn

from trainer.assemble.features import Features
from trainer.assemble.instantiate import check_components, construct
from trainer.assemble.objective import Chosen, typed_objective
from trainer.assemble.optimizer import typed_optimizer, typed_schedule
from trainer.assemble.tokenizer import RunTokenizer
from trainer.config.run_config import RunConfig, stated_coupling
from trainer.core.coupling import Coupling, model_coupling, strictest
from trainer.core.errors import ConfigError
from trainer.optim.optimizers import OptimizerSpec
from trainer.optim.schedules import Schedule
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
        tokenizer, features, cut = RunTokenizer(config), Features.of(config), _cut(config)
        _check_cut(config, features, cut)
        return cls(
            tokenizer=tokenizer,
            objective=typed_objective(config, tokenizer),
            spec=typed_optimizer(config),
            schedule=typed_schedule(config),
            cut=cut,
            features=features,
        )

    def coupling(self, config: RunConfig, module: nn.Module, objective: Coupling) -> Coupling:
        """Say how far the samples of a step depend on each other, by all that couples them."""
        found = model_coupling(module)
        if any(feature.accepts_cut for feature in self.features):  # whoever typed it knows
            found = replace(found, warning="")
        return strictest(found, stated_coupling(config), objective)


def _check_cut(config: RunConfig, features: Features, cut: Cut) -> None:
    """Refuse a feature that makes the cut a part of the step, where that chooses sizes itself."""
    for key, feature in features.by_key.items():
        if feature.accepts_cut and cut.chooses_sizes:
            name = config.features[key].name or config.features[key].target
            raise ConfigError(
                f"{key}={name}: depends on the micro-batch size; type accum=fixed accum.micro=N, "
                "where N is batch.global for the whole step at once"
            )


def batch_sizes(config: RunConfig) -> BatchSize:
    """Build what sizes the steps; accum.micro and accum.steps give a `batch.global` of null."""
    size = {"global_batch": config.batch.global_batch, "unit": config.batch.unit}
    return construct(config.batch, "batch", BatchSize, config.trust, size)


def _cut(config: RunConfig) -> Cut:
    """Build the cut; that of `deterministic=layout` is fixed, the same for all numbers of ranks."""
    cut = construct(config.accum, "accum", Cut, config.trust)
    if config.activation_checkpointing == "auto" and not cut.is_tunable:
        raise ConfigError("activation_checkpointing=auto: needs accum=auto")
    if config.deterministic != "layout":
        return cut
    if (same := cut.for_any_ranks) is None:
        text = "needs fixed micro-batches; type accum=fixed accum.micro=8"
        raise ConfigError(f"deterministic=layout: {text}")
    return same
