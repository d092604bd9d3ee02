"""Load the model that teaches: a run's, one that was exported, or one of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.assemble.instantiate import construct
from trainer.assemble.module import build_model
from trainer.assemble.saved import read_terms
from trainer.checkpoint.weights import CONFIG_FILE, checkpoint_weights, load_step, open_weights
from trainer.config.components import Component
from trainer.config.consent import own_classes
from trainer.config.option_files import options_of
from trainer.config.run_config import RunConfig
from trainer.config.validate import from_plain
from trainer.core.errors import ConfigError, TrainError
from trainer.core.hub_cache import weights_path
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.data.samples import preserve_generators


def load_teacher(path: str) -> nn.Module:
    """Build it with its weights on the CPU, whole, wherever the model beside it is."""
    with _disable_current_modes(), torch.device("cpu"), preserve_generators():
        try:
            return _load(weights_path(path), path)
        except TrainError as error:
            raise type(error)(f"objective.teacher={path}: {error}") from error


def _load(folder: Path, name: str) -> nn.Module:
    """Build the model of a run or an export of ours; any other is one of Hugging Face."""
    run = RunFolder(folder)
    if run.config():
        config = _of_run(run)
        loaded = load_step(folder, "last")
        given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
        return build_model(config, World(), given, stored=stored)[0]
    described: Any = run.record(CONFIG_FILE)
    if isinstance(section := described.get("model"), dict) and "_target_" in section:
        if described.get("transforms") or described.get("adapter"):
            raise ConfigError("has transforms or an adapter; name its run, or merge the adapter")
        component = Component(target=section["_target_"], params=described["arguments"])
        module = construct(component, "model", nn.Module)
        open_weights(folder).fill(module)
        return module
    option = options_of("model")["hf"]
    params = {**option, "path": name}
    component = Component(target=params.pop("_target_"), params=params, name="hf")
    return construct(component, "model", nn.Module)


def _of_run(run: RunFolder) -> RunConfig:
    """Read the config of a run; classes that its user typed, and nobody changed, are allowed."""
    config, own = from_plain(run.config()), own_classes(run)
    if config.model.target in own:
        typed = config.model.model_copy(update={"typed_target": True})
        config = config.model_copy(update={"model": typed})
    return config.model_copy(update={"device": "cpu", "command": "predict"})
