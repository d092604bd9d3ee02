"""Say what stands beside exported weights: arguments, tokenizer, and the lines that load them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer.assemble.instantiate import look_up
from trainer.assemble.tokenizer import RunTokenizer, source_of_model
from trainer.config.components import NO_ADAPTER, Component
from trainer.config.data_sets import source_components
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.format import shown_path
from trainer.data.tokenizers import hugging_face_tokenizer, read_template
from trainer.models.hugging_face import auto_class
from trainer.models.model_folder import copy_input_files
from trainer.models.text_pooling import writer_of_pooling


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
    parts = _data_parts(config)
    tokenizer = RunTokenizer(config)
    for key, part in parts.items():
        tokenizer.given_to(part, key)
    found = tokenizer.built
    if found is None and (source := source_of_model(config)) is not None:
        with suppress(ConfigError):  # the folder has none
            found = hugging_face_tokenizer(model=source)
    if not hasattr(found, "save_pretrained"):
        return None
    named = {part.params.get("chat_template") for part in parts.values()} - {None}
    if len(named) == 1:  # of several no single one goes with the weights
        found.chat_template = read_template(named.pop())
    return found


def writers_beside(
    config: RunConfig,
    model: nn.Module | None,
    tokenizer: Any,  # noqa: ANN401 - of any class
) -> list[Callable[[Path], object]]:
    """Give what writes more into the folder of the weights: tokenizer, pooling, processors."""
    found = [getattr(tokenizer, "save_pretrained", None), writer_of_pooling(model)]
    source = source_of_model(config)
    for key, part in _data_parts(config).items() if hasattr(model, "save_pretrained") else ():
        if (files := part.params.get("processor") or source) is not None:
            found.append(partial(copy_input_files, files))
        if write := getattr(look_up(part, key, config.trust), "write_processor", None):
            found.append(partial(write, model_path=source, **part.params))
    return [each for each in found if each is not None]


def _data_parts(config: RunConfig) -> dict[str, Component]:
    sources = {key: source for key, (source, _) in source_components(config.data).items()}
    return {"data": config.data, **sources}


def lines_to_load(
    config: RunConfig, model: nn.Module | None, to: Path, *, has_tokenizer: bool
) -> list[str]:
    """Write the lines of Python that load an export; none where it takes more than lines."""
    folder = shown_path(to)
    kind, lines = look_up(config.model, "model", config.trust), list[str]()
    has_class = any(isinstance(value, dict) for value in config.model.params.values())
    is_changed = bool(config.transforms) or config.adapter.target != NO_ADAPTER or has_class
    if hasattr(model, "save_pretrained"):
        name = auto_class(model)
        lines = [f"from transformers import {name}"]
        lines += [f'model = {name}.from_pretrained("{folder}")']
    elif inspect.isclass(kind) and not is_changed:
        lines = [
            "import json; from pathlib import Path; from safetensors.torch import load_file; "
            f"from {kind.__module__} import {kind.__name__}",
            f'arguments = json.loads(Path("{folder}/config.json").read_text())["arguments"]',
            f"model = {kind.__name__}(**arguments)",
            f'model.load_state_dict(load_file("{folder}/model.safetensors"))',
        ]
    return with_tokenizer(lines, to) if has_tokenizer else lines


def with_tokenizer(lines: list[str], to: Path) -> list[str]:
    """Add to lines of Python how the tokenizer in a folder is loaded."""
    name, beside = "AutoTokenizer", "from transformers import "
    first = next((place for place, line in enumerate(lines) if line.startswith(beside)), None)
    if first is None:
        lines = [*lines, f"{beside}{name}"]
    else:
        lines = [f"{line}, {name}" if i == first else line for i, line in enumerate(lines)]
    return [*lines, f'tokenizer = {name}.from_pretrained("{shown_path(to)}")']
