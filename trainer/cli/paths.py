"""Make the paths of a run absolute, so that it goes on elsewhere, and refuse those of no file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import get_args

from hydra.core.override_parser.types import Override

from trainer.cli import remote
from trainer.cli.overrides import quote, read_override
from trainer.cli.run_names import called, training_names
from trainer.config.command_words import commands_without_data
from trainer.config.components import (
    COMPONENTS,
    EVAL_SETS,
    NAMES_A_PATH,
    ExistingPath,
    PathOrName,
    WeightsPath,
    owner_of,
)
from trainer.config.consent import refuse_odd_files
from trainer.config.data_sets import sources
from trainer.config.declared import declared
from trainer.config.messages import clip, did_you_mean_file, flat, line
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.errors import DataError, NoCheckpointError
from trainer.core.format import expanded
from trainer.core.hub_cache import weights_path
from trainer.core.run_folder import RunFolder
from trainer.core.urls import is_url


def exists(path: str) -> bool:
    """Whether a path as typed leads anywhere; one that no system takes does not."""
    return os.path.exists(expanded(path))  # noqa: PTH110 - of pathlib it raises for long names


def absolute_paths(config: RunConfig) -> dict[str, Override]:
    """Give an override, by key, for each argument of a class, and `init`, that is a relative path.

    What says so is the name of the argument, or its type. One that is not there stays as it is.
    What names weights, as `init`, may be the name of a run, too.
    """
    found, values = {}, flat(to_plain(config))
    targets = {path: attrgetter(path)(config).target for path in COMPONENTS}
    targets |= {key: each.target for key, each in config.listed() if owner_of(key)}
    targets |= {key: each["_target_"] for key, each in sources(to_plain(config)).items()}
    declare = _arguments(targets, ExistingPath)
    weights = {"init", *_arguments(targets, WeightsPath)}
    from_stores = declare | _arguments(targets, PathOrName)
    reads_data = config.command not in commands_without_data()
    for key, value in values.items():
        is_named = owner_of(key) and NAMES_A_PATH.fullmatch(key)
        is_argument = is_named or key in declare
        # Of this package `data.path=json` is a format, whatever folder lies beside the run.
        is_format = key == "data.path" and config.data.target.startswith("datasets.")
        if not (is_argument or key in weights) or (is_format and str(value).isidentifier()):
            continue
        if key.startswith(EVAL_SETS) and value == values.get(f"data.{key.split('.', 3)[3]}"):
            # It follows that of the data.
            continue
        listed = value if isinstance(value, list) else [value]
        texts = [*filter(None, listed)]
        if all(isinstance(each, str) for each in texts):
            if reads_data and key in from_stores and owner_of(key) == "data":
                for text in texts:
                    remote.bring(expanded(text))
            find = partial(_weights_in_full, config, key) if key in weights else in_full
            paths = [*map(find, texts)]
            line = ",".join(map(quote, paths))
            if isinstance(value, list):
                line = f"[{line}]"
            if paths != texts:
                found[key] = read_override(f"++{key}={line}")
    return found


def _arguments(targets: Mapping[str, str], wanted: object) -> set[str]:
    """Give the keys of the arguments that classes declare to be of a type; they are by path."""
    found = set[str]()
    for path, target in targets.items():
        for name, kind in declared(target).types.items():
            if wanted in (kind, *get_args(kind)):
                found.add(f"{path}.{name}")
    return found


def in_full(path: str) -> str:
    """Make a path absolute; one that is not there may be a name on a hub, and stays."""
    return path if is_url(path) or not exists(path) else str(expanded(path).absolute())


def _weights_in_full(config: RunConfig, key: str, init: str) -> str:
    """Make the path of weights absolute, or give that of the run of this name.

    A name of weights in the hub's cache means these, whatever runs there are.
    """
    remote.bring(weights_path(init))
    if not exists(str(weights_path(init))):
        outputs = expanded(config.outputs).absolute()
        return str(called(key, init, outputs, suits=RunFolder.steps) or init)
    return in_full(init)


def refuse_missing(config: RunConfig) -> None:
    """Refuse a run whose data or weights are not there; some commands read no data."""
    init, paths = config.init, {"data.eval_path": config.data.eval_path}
    for key, each in (("data", config.data), *config.listed()):
        kind = declared(each.target).types.get("path")
        if owner_of(key) and ExistingPath in (kind, *get_args(kind)):
            paths[f"{key}.path"] = each.params.get("path")
    if config.command in commands_without_data():
        paths.clear()
    for key, path in paths.items():
        if path and not exists(path):
            meant = did_you_mean_file(path)
            text = f"no such file or folder{_below(path)}{meant and f'.{meant}'}"
            raise DataError(line(key, path, text))
    if init is not None:
        if not exists(str(source := weights_path(init))):
            fault = f"no such file or folder{_below(init)}, and no run of this name"
            fault = clip(f"init={init}: {fault}")
            near = training_names(expanded(config.outputs).absolute()).near(init)
            raise NoCheckpointError(f"{fault}. Did you mean init={near}?" if near else fault)
        refuse_odd_files(source, links=(source / RunFolder.CONFIG).exists())


def _below(path: str) -> str:
    return "" if path.startswith(("~", os.sep)) or is_url(path) else f" in {Path.cwd()}"
