"""Read what the folder of a model says: no pickle, and no size without a bound."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.core.errors import ConfigError
from trainer.core.hub_cache import model_files

CONFIG_FAULTS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises where a config is not as it should be."""

_MOST = {r"(layers?|depths?|experts|blocks)$": 10_000, r"num_labels$": 100_000}
"""Layers, or experts of one, and labels: for each an object is made, or a name."""
_INDEX = "model.safetensors.index.json"
_INPUT_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
"""Files that say how a model's inputs are made, beside those of its tokenizer."""


def read_config(source: str) -> Any:  # noqa: ANN401 - any config
    """Read a config of transformers, by its path or a name on the hub.

    Too many layers, names that are no classes, and a file named for the weights are refused.
    """
    from transformers import AutoConfig, PreTrainedConfig  # noqa: PLC0415 - seconds

    settings, _ = PreTrainedConfig.get_config_dict(source)
    refuse_sizes(settings, source)  # transformers may make a list of layers as it reads
    names = settings.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{source}: architectures={names} in its config: no names of classes")
    if "transformers_weights" in settings:
        raise ConfigError(f"{source}: transformers_weights in its config is not read; take it out")
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def refuse_sizes(settings: Mapping[str, Any], source: str) -> None:
    """Refuse a config that describes more layers, experts or labels than a model may have."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            refuse_sizes(value, source)
        numbers = value if isinstance(value, list) else [value]
        most = max((each for each in numbers if isinstance(each, int)), default=0)
        limit = next((n for pattern, n in _MOST.items() if re.search(pattern, name)), most)
        if most > limit:
            raise ConfigError(f"{source}: {name}={most} in its config: above {limit:,}")


def refuse_files(path: str) -> None:
    """Refuse an adapter's weights, and an index that names other files than safetensors by it."""
    if model_files(path, "adapter_config.json"):
        text = "holds an adapter; type the model under it, with adapter=lora init="
        raise ConfigError(f"model.path={path}: {text}{path}")
    for index in model_files(path, _INDEX):
        for name in json.loads(index.read_text())["weight_map"].values():
            if Path(str(name)).name != name or not name.endswith(".safetensors"):
                text = f"{_INDEX} names {name!r}; weights are read from safetensors files beside it"
                raise ConfigError(f"model.path={path}: {text}")


def copy_input_files(source: str, folder: Path) -> None:
    """Copy what says how a model's inputs are made into a folder of its weights."""
    for file in model_files(source, *_INPUT_FILES):
        shutil.copyfile(file, folder / file.name)
