"""Say what is exported: the model, and beside it arguments, tokenizer, and the lines that load it.

The model is built where the weights of a checkpoint alone will not do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer.assemble.data_sets import RunTokenizer, source_of_model
from trainer.assemble.instantiate import look_up, run_features
from trainer.assemble.module import build_model
from trainer.assemble.saved import Saved, read_terms
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import CONFIG_FILE, WEIGHTS_FILE, checkpoint_weights
from trainer.commands.evaluate import open_evaluation
from trainer.config.components import NO_ADAPTER, Component
from trainer.config.data_sets import source_components
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.models.facts import ModelFacts, model_library
from trainer.report.console import Screen


def built(config: RunConfig, loaded: Loaded, world: World) -> nn.Module | None:
    """Build the model where the weights alone will not do, or it may write itself."""
    if any(feature.estimates for feature in run_features(config)):
        # Their buffers are set from the run's data, and stay what they are once it is closed.
        with open_evaluation(config, Saved.read(config, loaded, world), world) as (run, _):
            module = run.model.module
            values = {name: value.clone() for name, value in module.named_buffers()}
        module.load_state_dict(values, strict=False)
        return module
    # Which imports what makes it.
    kind = look_up(config.model, "model", config.trust)
    given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
    has_adapter = config.adapter.target != NO_ADAPTER
    may_save_itself = hasattr(kind, "save_pretrained") or not inspect.isclass(kind)
    if not (may_save_itself or stored.frozen or has_adapter):
        return None
    try:
        return build_model(config, world, given, stored=stored)[0]
    except ConfigError as error:
        # What it was loaded from may be gone.
        if stored.frozen or has_adapter:
            raise
        Screen().warn(f"{error}: only the weights are written, not the layout of its library")
        return None


def export_config(config: RunConfig, given: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Write what is exported as its config.json has it; `given` is what the data gave the model."""
    params = config.model.params
    takes = inspect.signature(look_up(config.model, "model", config.trust)).parameters
    filled = dict[str, Any]()
    for name, value in given.items():
        # What was typed counts before what the data gave, as when the model was built.
        if name in takes and value is not None and params.get(name) is None:
            filled[name] = value
    description: dict[str, Any] = {
        "model": {"_target_": config.model.target, **params},
        "arguments": {**params, **filled},
        "step": step,
    }
    if config.transforms:
        description["transforms"] = to_plain(config)["transforms"]
    return description


def tokenizer_of(config: RunConfig) -> Any:  # noqa: ANN401 - of any class
    """Build the tokenizer that goes with a run's weights; None where there is none to be written.

    It is that of the data or, where they take none, that of the folder of the model.
    """
    parts, tokenizer = _data_parts(config), RunTokenizer(config)
    arguments = [part.params for part in parts.values()]
    try:
        for key, part in parts.items():
            tokenizer.given_to(part, key)
        return model_library().tokenizer_beside(tokenizer.built, source_of_model(config), arguments)
    except ConfigError as error:
        # Its files may be gone.
        Screen().warn(f"{error}: no tokenizer is written")
        return None


def writers_beside(
    config: RunConfig,
    facts: ModelFacts,
    tokenizer: Any,  # noqa: ANN401 - of any class
) -> list[Callable[[Path], object]]:
    """Give what writes more into the folder of the weights: tokenizer, pooling, processors."""
    found = list[Callable[[Path], object]]()
    if tokenizer is not None:
        found.append(tokenizer.save_pretrained)
    if facts.save_beside is None:
        return found
    source, parts = source_of_model(config), _data_parts(config)
    sources, save = list[str](), facts.save_beside
    for part in parts.values():
        # Without a processor of its own a data set takes the model's.
        if (file := part.params.get("processor") or source) is not None:
            sources.append(file)
    found.append(lambda folder: save(folder, sources))
    for key, part in parts.items():
        if write := getattr(look_up(part, key, config.trust), "write_processor", None):
            found.append(partial(write, model_path=source, **part.params))
    return found


def _data_parts(config: RunConfig) -> dict[str, Component]:
    sources = {key: source for key, (source, _) in source_components(config.data).items()}
    return {"data": config.data, **sources}


def lines_to_load(config: RunConfig, facts: ModelFacts, folder: Path) -> list[str]:
    """Write the lines of Python that load an export; none where it takes more than lines."""
    if facts.how_to_load is not None:
        return facts.how_to_load(folder)
    kind = look_up(config.model, "model", config.trust)
    has_class = any(isinstance(value, dict) for value in config.model.params.values())
    has_adapter = config.adapter.target != NO_ADAPTER and not config.export.merge
    if not inspect.isclass(kind) or config.transforms or has_adapter or has_class:
        return []
    described, weights = (str(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
    read = f"json.loads(pathlib.Path({described!r}).read_text())"
    return [
        "import json, pathlib, safetensors.torch",
        f"from {kind.__module__} import {kind.__name__}",
        f'model = {kind.__name__}(**{read}["arguments"])',
        f"model.load_state_dict(safetensors.torch.load_file({weights!r}))",
    ]
