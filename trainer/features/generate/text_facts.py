"""Say how the text of a run becomes tokens, without its data where their class can do it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from trainer.assemble.data_sets import RunTokenizer, open_data, purpose_of_model
from trainer.assemble.instantiate import look_up
from trainer.config.components import Component
from trainer.config.data_sets import source_components
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.data.samples import DataFacts


def text_facts(config: RunConfig, folder: Path, world: World) -> DataFacts:
    """Give `prompt` and `decode` of a run's data, with what else is known of their tokens.

    A class that has a static method `text_facts` is asked for them; else the data are read.
    """
    key = "data"
    data: Component = config.data
    # Sources share the settings of a mixture, and the first one says what a text is.
    if sources := source_components(data):
        key, (first, _) = next(iter(sources.items()))
        data = first.model_copy(update={"params": {**data.params, **first.params}})
    tokenizer = RunTokenizer(config)
    kind: Any = look_up(data, key, config.trust)
    if _has_text_facts(kind):
        recorded = RunFolder(folder).record(RunFolder.PLAN).get("data_format")
        given: dict[str, Any] = {**purpose_of_model(config), "data_format": recorded}
        given |= {**data.params, **tokenizer.given_to(data, key)}
        names = inspect.signature(kind.text_facts).parameters
        found: DataFacts = kind.text_facts(**{n: given[n] for n in names if n in given})
    else:
        found = open_data(config, world, tokenizer).train.facts
    if found.prompt is None or found.decode is None:
        text = "has no `prompt` and `decode`, which turn text into tokens and back"
        raise ConfigError(f"data={data.label}: {text}")
    return found


def _has_text_facts(kind: Any) -> bool:  # noqa: ANN401 - a class, or a function that makes one
    """Whether a class says it, and none that derives from it turns text into tokens otherwise."""
    for each in getattr(kind, "__mro__", ()):
        if "text_facts" in vars(each):
            return True
        if not {"decode", "prompt", "facts"}.isdisjoint(vars(each)):
            return False
    return False
