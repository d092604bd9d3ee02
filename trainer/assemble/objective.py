"""Choose the objective that a model is made for, where none was typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn

from trainer.assemble.data_sets import RunTokenizer
from trainer.assemble.features import Features
from trainer.assemble.instantiate import construct
from trainer.config import components
from trainer.config.messages import show
from trainer.config.option_files import options_of
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import LABELS
from trainer.data.loader import Loader
from trainer.data.samples import INPUT_IDS
from trainer.models.facts import facts_of
from trainer.objectives.base import Objective
from trainer.objectives.metrics import with_sums

_TO_TYPE = (
    "type objective=next_token (predicts the next token; shifts labels itself), token_classify (a "
    "class per token), classify (one label per sample), or model_loss objective.reduction=mean "
    "objective.causal=false (a mean that the model computes itself, from labels as they are)"
)


@final
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The objective of a run."""

    objective: Objective
    component: components.Component  # its class and all of its arguments, as if they had been typed
    text: str  # its name, with the settings that are no defaults and the reason, for a person
    # Whether it must be the loss that the model computes itself, where it computes one
    is_like_models: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class ByModel:
    """Stands for the objective that a model is made for; what is None is left to that objective."""

    label_smoothing: components.Share | None = None
    z_loss: components.NonNegative | None = None
    class_weights: components.ClassWeights | None = None
    reduction: components.LossReduction | None = None
    causal: bool | None = None
    mlm_probability: components.Share | None = None


def typed_objective(config: RunConfig, tokenizer: RunTokenizer) -> Chosen | None:
    """Build the objective of a config; None where the model is to say which one it is."""
    component = config.objective
    if component.target == components.AUTO_OBJECTIVE:
        return None
    given = tokenizer.given_to(component, "objective")
    objective = construct(component, "objective", Objective, config.trust, given)
    return _chosen(config, objective, component)


def choose_objective(
    config: RunConfig,
    typed: Chosen | None,
    module: nn.Module,
    loader: Loader,
    tokenizer: RunTokenizer,
    features: Features,
    recorded: Mapping[str, Any],
) -> Chosen:
    """Take the objective that was typed, or the one for the model; samples are prepared for it."""
    if (chosen := typed) is None:
        fields = loader.load(loader.longest())
        chosen = fitting_objective(config, module, fields, tokenizer)
    found = dict[str, Any]()
    for feature in features:
        found |= feature.decided(chosen.objective, loader.dataset, recorded)
    if found:
        component = chosen.component
        component = component.model_copy(update={"params": {**component.params, **found}})
        given = tokenizer.given_to(component, "objective")
        objective = construct(component, "objective", Objective, config.trust, given)
        chosen = _chosen(config, objective, component)
    # Where it changes no sample, loading seeds no generators.
    if type(chosen.objective).prepare is not Objective.prepare:
        loader.prepare_with(chosen.objective.prepare)
    return chosen


def trained_objective(
    config: RunConfig, recorded: Mapping[str, Any], tokenizer: RunTokenizer
) -> Objective:
    """Build the objective of a run that is read, by the contract of its checkpoint, `recorded`."""
    component: components.Component = config.objective
    params = dict[str, Any]()
    for key, value in recorded.items():
        if key.startswith("objective."):
            params[key.removeprefix("objective.")] = value
    target = str(params.pop("_target_", None))
    # One that nobody typed is what it became there.
    if component.target == components.AUTO_OBJECTIVE:
        component = components.Component(target=target, params=params)
    elif component.target != target:
        text = f"the run has {target.rpartition('.')[2]}; leave it out"
        raise ConfigError(f"objective={component.label}: {text}")
    given = tokenizer.given_to(component, "objective")
    return construct(component, "objective", Objective, config.trust, given)


def frozen_model(config: RunConfig, objective: Objective, module: nn.Module) -> nn.Module | None:
    """Make what is beside a model; one below an adapter is not how a run with `init=` began."""
    can_switch = facts_of(module).without_adapter is not None
    return objective.frozen_model(module, has_base=can_switch and config.init is None)


def fitting_objective(
    config: RunConfig, module: nn.Module, fields: Fields, tokenizer: RunTokenizer
) -> Chosen:
    """Build the objective that a model is made for; `fields` are a collated micro-batch."""
    template = construct(config.objective, "objective", ByModel)
    typed = {key: value for key, value in vars(template).items() if value is not None}
    option, why = _by_model(module, fields)
    params = {**options_of("objective")[option], **typed}
    component = components.Component(target=params.pop("_target_"), params=params, name=option)
    # A setting that was typed for another objective is refused, and not left out.
    given = tokenizer.given_to(component, "objective")
    objective = construct(component, "objective", Objective, given=given)
    return replace(_chosen(config, objective, component, why), is_like_models=not typed)


def _by_model(module: nn.Module, fields: Fields) -> tuple[str, str]:
    """Name the option for a model, or for its labels, and why it is that."""
    if (found := facts_of(module).objective(fields)) is not None:
        return found
    name, labels, ids = type(module).__name__, fields.get(LABELS), fields.get(INPUT_IDS)
    is_shaped_as_ids = ids is not None and labels is not None and ids.shape == labels.shape
    if labels is None:
        fault = f"the data give no field named labels (they give: {', '.join(fields)})"
    elif labels.is_floating_point() or labels.is_complex():
        raise ConfigError(
            f"objective: labels are {labels.dtype}, and {name} does not say what it is made for: "
            "type objective._target_=mine.Loss, a class of your own "
            "(docs/how-to/own/objective.md), or "
            "objective=model_loss where the model computes its loss"
        )
    elif labels.dim() == 1:
        return "classify", "as the data give one label per sample"
    elif labels.dim() != 2:  # noqa: PLR2004 - (batch, time)
        return "classify", "as the data give a label per pixel"
    elif is_shaped_as_ids and ((labels == ids) | (labels == IGNORED)).all():
        return "next_token", "as the labels are the tokens themselves"
    else:
        fault = "labels are sequences, but not the input_ids themselves"
    raise ConfigError(
        f"objective: {fault}, and {name} does not say what it is made for: {_TO_TYPE}"
    )


def _chosen(
    config: RunConfig, objective: Objective, component: components.Component, why: str = ""
) -> Chosen:
    objective = with_sums(objective, config.objective.metrics)
    name = component.label
    defaults = options_of("objective", config.config_dir).get(name, {})
    words = [name]
    for key, value in component.params.items():
        if defaults.get(key) != value:
            words.append(f"{key}={show(value)}")
    text = " ".join(words) + (why and f", {why}")
    return Chosen(objective=objective, component=component, text=text)
