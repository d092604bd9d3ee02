"""Build the parts of a run that need neither data nor model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

from trainer.assemble.features import Features
from trainer.assemble.instantiate import check_components, construct
from trainer.assemble.objective import Chosen, typed_objective
from trainer.assemble.optimizer import typed_optimizer, typed_schedule
from trainer.assemble.tokenizer import RunTokenizer
from trainer.config.run_config import RunConfig
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
        features.check_cut(config, cut)
        return cls(
            tokenizer=tokenizer,
            objective=typed_objective(config, tokenizer),
            spec=typed_optimizer(config),
            schedule=typed_schedule(config),
            cut=cut,
            features=features,
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
