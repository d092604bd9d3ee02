"""Put together what predicts: the model of a checkpoint, the run's objective, and other data."""

from __future__ import annotations

from contextlib import suppress

from trainer.assemble.data_sets import RunTokenizer, open_data
from trainer.assemble.features import Features
from trainer.assemble.hardware import resolve_precision
from trainer.assemble.instantiate import check_components, construct
from trainer.assemble.loaders import fit_loader, open_loader
from trainer.assemble.module import build_model
from trainer.assemble.objective import fitting_objective
from trainer.assemble.saved import Saved, Terms
from trainer.config.components import AUTO_OBJECTIVE, Component
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.samples import DataFacts, faults_of
from trainer.models.bind import AUTOCAST, bind
from trainer.models.facts import facts_of
from trainer.objectives.base import Objective
from trainer.objectives.text_output import TextOutput
from trainer.parallel.base import Replicated
from trainer.training.consistency import check_consistency
from trainer.training.predict_records import Predictor


def open_predictor(config: RunConfig, saved: Saved, world: World) -> Predictor:
    """Build the model of a checkpoint whole on each rank, and open the data to predict. Collective.

    Of the config count the model and the data: no step is cut or taken. Class names, columns and
    the objective are those that the run had.
    """
    check_components(config)
    for feature in Features.of(config):
        if (setting := feature.estimates) is not None:
            text = "estimates over the training data of the run, which are not read"
            raise ConfigError(f"{setting}: {text}: type {setting.partition('=')[0]}=null")
    terms, tokenizer = saved.terms, RunTokenizer(config)
    names = terms.given.get("label_names")
    data = open_data(config, world, tokenizer, names, terms.record_format).train
    if not len(data):
        raise DataError(f"data: {data.kind} holds no samples to predict")
    module, _ = build_model(config, world, terms.given, stored=saved.stored)
    precision = resolve_precision(config, world, module, terms.contract)
    loader = open_loader(config, world, data)
    # One that is made of it changes no sample as training does.
    loader = loader.of(data, loader.num_workers)
    fit_loader(loader, module)
    objective = _objective(config, terms, tokenizer)
    if objective.is_of_model:
        # The loss of a model tells nothing else: what it is made for does.
        keys = {"target": AUTO_OBJECTIVE, "params": {}, "metrics": ()}
        auto = config.model_copy(update={"objective": config.objective.model_copy(update=keys)})
        with suppress(ConfigError):
            fields = loader.load(loader.longest())
            objective = fitting_objective(auto, module, fields, tokenizer).objective
    if type(objective).prepare is not Objective.prepare:
        loader.prepare_with(objective.prepare)
    check_consistency(world, [loader], module)
    call = bind(module, autocast=AUTOCAST.get(precision), device_type=world.device.type)
    return Predictor(
        model=Replicated(module, call, (), world),
        objective=objective,
        loader=loader,
        world=world,
        names=names,
        most_tokens=saved.cut.evaluation_tokens,
        text=_text_output(config, data.facts, facts_of(module).max_positions),
    )


def _objective(config: RunConfig, terms: Terms, tokenizer: RunTokenizer) -> Objective:
    """Build the objective of a run; one that nobody typed is what it became there."""
    component: Component = config.objective
    params, found = dict[str, object](), str(terms.contract.get("objective._target_"))
    for key, value in terms.contract.items():
        if key.startswith("objective."):
            params[key.removeprefix("objective.")] = value
    params.pop("_target_", None)
    if component.target == AUTO_OBJECTIVE:
        component = Component(target=found, params=params)
    elif component.target != found:
        text = f"the run has {found.rpartition('.')[2]}; leave it out"
        raise ConfigError(f"objective={component.label}: {text}")
    given = tokenizer.given_to(component, "objective")
    return construct(component, "objective", Objective, config.trust, given)


def _text_output(config: RunConfig, facts: DataFacts, max_positions: int | None) -> TextOutput:
    """Say how text is written, by what the data know of their tokens."""
    ends = [*facts.answer_ends]
    if facts.prompt is not None:
        with faults_of("`prompt` of the data"):
            ends += facts.prompt("a")[1]
    limits = [each for each in (facts.max_length, max_positions) if each]
    return TextOutput(
        decode=facts.decode_answer or facts.decode,
        ends=frozenset(ends),
        most=config.log.generate_tokens,
        limit=min(limits, default=None),
        vocab_size=facts.vocab_size,
    )
