"""Build the model that is exported, and say what stands beside its weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer.assemble.components import assemble
from trainer.assemble.instantiate import look_up
from trainer.assemble.model import build_model
from trainer.assemble.resumption import refuse_changed_data
from trainer.assemble.run_plan import prepare
from trainer.assemble.saved import Saved, read_terms
from trainer.assemble.step import step_context
from trainer.assemble.tokenizer import RunTokenizer, source_of_model
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import checkpoint_weights
from trainer.config.components import NO_ADAPTER, Component
from trainer.config.data_sets import source_components
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import ConfigError
from trainer.core.format import shown_path
from trainer.core.world import World
from trainer.data.tokenizers import hugging_face_tokenizer, read_template
from trainer.models.hugging_face import auto_class
from trainer.models.model_folder import copy_input_files
from trainer.models.text_pooling import writer_of_pooling
from trainer.report.console import Screen
from trainer.training.precise_statistics import precise_statistics


def describe(config: RunConfig, given: Mapping[str, Any], step: int) -> dict[str, Any]:
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


def loads_by_auto(tokenizer: Any) -> bool:  # noqa: ANN401 - of any class
    """Whether the AutoTokenizer of transformers knows the class of a tokenizer."""
    return type(tokenizer).__module__.partition(".")[0] == "transformers"


def lines_to_load(
    config: RunConfig, model: nn.Module | None, to: Path, *, has_tokenizer: bool
) -> list[str]:
    """Write the lines of Python that load an export; none where it takes more than lines."""
    folder = shown_path(to)
    kind, lines = look_up(config.model, "model", config.trust), list[str]()
    if hasattr(model, "save_pretrained"):
        name = auto_class(model)
        lines = [f"from transformers import {name}"]
        lines += [f'model = {name}.from_pretrained("{folder}")']
    elif inspect.isclass(kind) and not _is_changed(config):
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


def _is_changed(config: RunConfig) -> bool:
    """Whether a model is more than what its constructor gives for plain arguments."""
    has_class = any(isinstance(value, dict) for value in config.model.params.values())
    return bool(config.transforms) or config.adapter.target != NO_ADAPTER or has_class


def built(config: RunConfig, loaded: Loaded, world: World) -> nn.Module | None:
    """Build the model where the weights alone will not do, or it may be one of transformers."""
    if config.batchnorm.precise is not None:
        return _with_precise_statistics(config, loaded, world)
    kind = look_up(config.model, "model", config.trust)  # which imports what makes it
    given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
    has_adapter = config.adapter.target != NO_ADAPTER
    may_be_theirs = "transformers" in sys.modules or not inspect.isclass(kind)
    if not (may_be_theirs or stored.frozen or has_adapter):
        return None
    try:
        return build_model(config, world, given, stored=stored)[0]
    except ConfigError as error:  # what it was loaded from may be gone
        if stored.frozen or has_adapter:
            raise
        Screen().warn(f"{error}: only the weights are written, not the layout of transformers")
        return None


def _with_precise_statistics(config: RunConfig, loaded: Loaded, world: World) -> nn.Module:
    """Build the run with its data, and estimate its running statistics again."""
    saved = Saved.read(config, loaded, world)
    components = assemble(config, world, saved)
    refuse_changed_data(components, saved.terms)
    components = prepare(components).components
    model = step_context(components).model
    with closing(components.feed(world)) as feed:
        with precise_statistics(model, feed, config.batchnorm.precise):
            values = {name: value.clone() for name, value in components.module.named_buffers()}
        components.module.load_state_dict(values, strict=False)
    return components.module
