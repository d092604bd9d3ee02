"""Compose options and validate them with values typed, as the command line does."""

import copy
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from trainer.config.components import COMPONENTS
from trainer.config.option_files import data_dir
from trainer.config.recipes import register
from trainer.config.run_config import RunConfig
from trainer.config.validate import validate

CONF = data_dir("conf")


def composed(*overrides: str) -> Any:
    """What Hydra makes of overrides, with its own node."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


@cache
def options(*choices: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options alone, as plain mappings, and which they are."""
    full = composed(*choices)
    picked = dict(full.hydra.runtime.choices)
    with open_dict(full):
        del full["hydra"]
    return OmegaConf.to_container(full, resolve=True), picked


def put(tree: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree[section] = tree.get(section) if isinstance(tree.get(section), dict) else {}
        tree = tree[section]
    tree[last] = value


def checked(values: dict[str, Any] | None = None, *choices: str) -> RunConfig:
    """Validate the options with these values typed."""
    values = values or {}
    base, picked = options(*choices)
    raw = copy.deepcopy(base)
    for key, value in values.items():
        put(raw, key, value)
    named = {path for path in COMPONENTS if f"{path}._target_" in values}
    return validate(raw, base, named, picked, values.keys())
