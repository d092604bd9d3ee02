"""Read what the folder of a model says: no pickle, and no size without a bound.

How a model pools the embeddings of a text's tokens stands in files of sentence-transformers,
modules.json and 1_Pooling/config.json.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.components import Pooling, Task
from trainer.config.messages import did_you_mean_file
from trainer.config.other_trainers import REFUSED
from trainer.core.errors import ConfigError
from trainer.core.hub_cache import model_files, why_absent
from trainer.features.hugging_face.task import WORDS

_MOST = {r"(layers?|depths?|experts|blocks)$": 10_000, r"num_labels$": 100_000}
"""Layers, or experts of one, and labels: for each an object is made, or a name."""
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_POOLING_FILE = "1_Pooling/config.json"
_MODES: Mapping[str, Pooling | None] = WORDS["pooling"]


def read_config(source: str) -> Any:  # noqa: ANN401 - any config
    """Read a config of transformers, by its path or a name on the hub.

    Too many layers, names that are no classes, and a file named for the weights are refused.
    """
    from transformers import AutoConfig, PreTrainedConfig  # noqa: PLC0415 - seconds

    settings, _ = PreTrainedConfig.get_config_dict(source)
    # Checked before transformers reads it, which may make a list of layers.
    refuse_sizes(settings, source)
    names = settings.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{source}: architectures={names} in its config: no names of classes")
    if settings.get("quantization_config"):
        why = REFUSED["quantization"].partition(";")[0]
        text = f"quantization_config in its config: {why}; take the model that it was made of"
        raise ConfigError(f"{source}: {text}")
    if "transformers_weights" in settings:
        raise ConfigError(f"{source}: transformers_weights in its config is not read; take it out")
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def refuse_sizes(settings: Mapping[str, Any], source: str) -> None:
    """Refuse a config that describes more layers, experts or labels than a model may have."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            refuse_sizes(value, source)
        # One for each stage, as of a vision model, or one of all
        numbers = value if isinstance(value, list) else [value]
        most = 0
        for number in numbers:
            if isinstance(number, int):
                most = max(most, number)
        for pattern, limit in _MOST.items():
            if most > limit and re.search(pattern, name):
                raise ConfigError(f"{source}: {name}={most} in its config: above {limit:,}")


def not_found(what: str, source: str) -> str:
    """Say that a path, or name on the hub, is nowhere, and what is spelt like it."""
    meant = did_you_mean_file(source)
    return f"{why_absent(what)}.{meant}" if meant else why_absent(what)


def refuse_adapter(path: str) -> None:
    """Refuse an adapter in place of a model, and name the model that it is of."""
    if model_files(path, _ADAPTER):
        config, base = _read(path, _ADAPTER), None
        if isinstance(config, dict):
            base = config.get("base_model_name_or_path")
        typed = shlex.quote(f"model.path={base or 'MODEL'}")
        text = f"holds an adapter of {base or 'another model'}; type"
        raise ConfigError(f"model.path={path}: {text} {typed} adapter=lora init={path}")


def refuse_files(path: str) -> None:
    """Refuse an index of weights that names other files than safetensors beside it."""
    for index in model_files(path, _INDEX):
        for name in json.loads(index.read_text())["weight_map"].values():
            if Path(str(name)).name != name or not name.endswith(".safetensors"):
                text = f"{_INDEX} names {name!r}; weights are read from safetensors files beside it"
                raise ConfigError(f"model.path={path}: {text}")


def copy_input_files(source: str, folder: Path) -> None:
    """Copy what says how a model's inputs are made into a folder of its weights."""
    for file in model_files(source, *WORDS["input_files"]):
        shutil.copyfile(file, folder / file.name)


def pooling_of(made_for: Task, pooling: Pooling | None, path: str | None) -> Pooling | None:
    """Say how a model that embeds texts pools; None of any other, of which nothing may be typed."""
    if made_for == "embedding":
        pooling = pooling or _stated_pooling(path)
        _refuse_parts(path)
        return pooling
    if pooling is not None:
        raise ConfigError(f"model.pooling={pooling}: is for model.task=embedding, not {made_for}")
    return None


def write_pooling(folder: Path, pooling: str, width: int | None) -> None:
    """Write how a model pools, and how wide its embeddings are, into a folder of its weights."""
    modes = {name: mode == pooling for name, mode in _MODES.items()}
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    for path, _ in parts[1:]:
        (folder / path).mkdir()
    (folder / _POOLING_FILE).write_text(
        json.dumps({"word_embedding_dimension": width, **modes}, indent=2)
    )
    listed = list[dict[str, Any]]()
    for i, (path, kind) in enumerate(parts):
        type_name = f"sentence_transformers.models.{kind}"
        listed.append({"idx": i, "name": str(i), "path": path, "type": type_name})
    (folder / "modules.json").write_text(json.dumps(listed, indent=2))


def _stated_pooling(path: str | None) -> Pooling:
    """Read how a model of sentence-transformers pools; any other takes the mean."""
    stated = _read(path, _POOLING_FILE)
    if stated is None:
        return "mean"
    modes = list[str]()
    if isinstance(stated, dict):
        for name, value in stated.items():
            if name in _MODES and value is True:
                modes.append(name)
    # Several are concatenated there, which makes an embedding wider than the model.
    if len(modes) != 1 or (found := _MODES[modes[0]]) is None:
        raise ConfigError(
            f"model.path={path}: {_POOLING_FILE} says {' and '.join(modes) or 'no way'}; "
            "type model.pooling=mean, cls or last"
        )
    return found


def _refuse_parts(path: str | None) -> None:
    """Refuse a model with a part, such as a dense layer, that would be left out."""
    listed = _read(path, "modules.json")
    for each in listed or ():
        if not isinstance(each, dict):
            continue
        name = str(each.get("type")).rpartition(".")[2]
        if name not in WORDS["modules"]:
            raise ConfigError(
                f"model.path={path}: modules.json has a {name}, which would be left out; take the "
                "model without it, or write a class for it: model._target_=mine.Model"
            )


def _read(path: str | None, name: str) -> Any:  # noqa: ANN401 - any JSON
    """Read a file of a model's folder, or of the hub; None where there is none."""
    if not path:
        return None
    files = model_files(path, name)
    if not files:
        return None
    try:
        return json.loads(files[0].read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {name} is not valid JSON: {error}") from error
