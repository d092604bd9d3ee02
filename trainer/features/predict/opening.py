"""Put together what predicts: the model of a checkpoint, the run's objective, and other data."""

from __future__ import annotations

from contextlib import suppress

from trainer.assemble.data_sets import RunTokenizer, open_data
from trainer.assemble.instantiate import check_components, run_features
from trainer.assemble.loaders import fit_loader, open_loader
from trainer.assemble.objective import fitting_objective, trained_objective
from trainer.assemble.saved import Saved
from trainer.config.components import AUTO_OBJECTIVE
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.features.predict.predictor import RecordPredictor
from trainer.features.predict.whole_model import whole_model
from trainer.models.facts import facts_of
from trainer.objectives.base import Objective
from trainer.objectives.text_output import TextOutput
from trainer.training.consistency import check_consistency


def open_predictor(config: RunConfig, saved: Saved, world: World) -> RecordPredictor:
    """Build the model of a checkpoint whole on each rank, and open the data to predict. Collective.

    Of the config count the model and the data: no step is cut or taken. Class names, columns and
    the objective are those that the run had.
    """
    check_components(config)
    _refuse_estimates(config)
    terms, tokenizer = saved.terms, RunTokenizer(config)
    names = terms.given.get("label_names")
    data = open_data(config, world, tokenizer, names, terms.record_format).train
    if not len(data):
        raise DataError(f"data: {data.kind} holds no samples to predict")
    model = whole_model(config, saved, world)
    loader = open_loader(config, world, data)
    # One that is made of it changes no sample as training does.
    loader = loader.of(data, loader.num_workers)
    fit_loader(loader, model.module)
    objective = trained_objective(config, terms.contract, tokenizer)
    # In the place of a model's own loss, which tells nothing else, what it is made for
    if objective.is_of_model:
        keys = {"target": AUTO_OBJECTIVE, "params": {}, "metrics": ()}
        auto = config.model_copy(update={"objective": config.objective.model_copy(update=keys)})
        # A model that does not say it has its loss alone.
        with suppress(ConfigError):
            fields = loader.load(loader.longest())
            objective = fitting_objective(auto, model.module, fields, tokenizer).objective
    if type(objective).prepare is not Objective.prepare:
        loader.prepare_with(objective.prepare)
    check_consistency(world, [loader], model.module)
    max_positions = facts_of(model.module).max_positions
    return RecordPredictor(
        model=model,
        objective=objective,
        loader=loader,
        world=world,
        names=names,
        most_tokens=saved.cut.evaluation_tokens,
        text=TextOutput.of(data.facts, config.log.generate_tokens, max_positions),
    )


def _refuse_estimates(config: RunConfig) -> None:
    """Refuse what needs training data, for those of the run are not read."""
    for feature in run_features(config):
        if (setting := feature.estimates) is not None:
            text = "estimates over the training data of the run, which are not read"
            raise ConfigError(f"{setting}: {text}: type {setting.partition('=')[0]}=null")
