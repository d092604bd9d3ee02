"""Say what stands beside exported weights: arguments, tokenizer, and the lines that load them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.assemble.instantiate import look_up
from trainer.assemble.tokenizer import RunTokenizer, source_of_model
from trainer.config.components import NO_ADAPTER, Component
from trainer.config.data_sets import source_components
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.format import shown_path
from trainer.models.facts import ModelFacts, model_library
from trainer.report.console import Screen


def export_config(config: RunConfig, given: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Write what is exported as its config.json has it; `given` is what the data gave the model."""
    params = config.model.params
    takes = inspect.signature(look_up(config.model, "model", config.trust)).parameters
    filled = {n: v for n, v in given.items() if n in takes and params.get(n) is None}
    filled = {name: value for name, value in filled.items() if value is not None}
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
    except ConfigError as error:  # its files may be gone
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
    files = [part.params.get("processor") or source for part in parts.values()]
    sources, save = [each for each in files if each is not None], facts.save_beside
    found.append(lambda folder: save(folder, sources))
    for key, part in parts.items():
        if write := getattr(look_up(part, key, config.trust), "write_processor", None):
            found.append(partial(write, model_path=source, **part.params))
    return found


def _data_parts(config: RunConfig) -> dict[str, Component]:
    sources = {key: source for key, (source, _) in source_components(config.data).items()}
    return {"data": config.data, **sources}


def lines_to_load(config: RunConfig, facts: ModelFacts, to: Path) -> list[str]:
    """Write the lines of Python that load an export; none where it takes more than lines."""
    folder = shown_path(to)
    if facts.how_to_load is not None:
        return facts.how_to_load(folder)
    kind = look_up(config.model, "model", config.trust)
    has_class = any(isinstance(value, dict) for value in config.model.params.values())
    is_changed = bool(config.transforms) or config.adapter.target != NO_ADAPTER or has_class
    if not inspect.isclass(kind) or is_changed:
        return []
    return [
        "import json; from pathlib import Path; from safetensors.torch import load_file; "
        f"from {kind.__module__} import {kind.__name__}",
        f'arguments = json.loads(Path("{folder}/config.json").read_text())["arguments"]',
        f"model = {kind.__name__}(**arguments)",
        f'model.load_state_dict(load_file("{folder}/model.safetensors"))',
    ]
