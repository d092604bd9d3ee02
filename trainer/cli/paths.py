"""Make the paths of a run absolute, so that it goes on from another folder with the same files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

from trainer.cli.overrides import quote
from trainer.config.components import COMPONENTS
from trainer.config.run_config import RunConfig
from trainer.core.format import expanded

_IS_PATH = re.compile(r"(^|[._])(path|paths|file|files|dir|folder|root)($|[._])")
"""Keys that may name a file or folder, by a word in them: `data.path`, `data.data_files`."""

_NAMES_FORMATS = "datasets."
"""Of this package `data.path=json` is a format, whatever folder lies beside the run."""


def exists(path: str) -> bool:
    """Whether a path as typed leads anywhere; one that no system takes does not."""
    return os.path.exists(expanded(path))  # noqa: PTH110 - of pathlib it raises for long names


def absolute_paths(config: RunConfig, typed: Collection[str]) -> tuple[RunConfig, dict[str, str]]:
    """Make relative paths of files that are there absolute: arguments of classes, and `init`.

    Inside a mapping only those are that have a key of their own on the command line. Nothing else
    about a text says that it is a path, so one that is not there stays as it is.

    Args:
        config: of the run.
        typed: dotted keys that the command line gives a value.

    Returns:
        The config, and the values that changed, as they are typed.
    """
    changed: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    word = str(config.data.params.get("path"))
    is_format = config.data.target.startswith(_NAMES_FORMATS) and word.isidentifier()

    def is_path(key: str) -> bool:
        is_own = key in typed or key.count(".") == 1
        return is_own and bool(_IS_PATH.search(key)) and not (is_format and key == "data.path")

    for name in (each for each in COMPONENTS if "." not in each):
        component = getattr(config, name)
        params = _with_absolute(component.params, name, is_path, changed)
        if params != component.params:
            sections[name] = component.model_copy(update={"params": params})
    if config.init is not None and (init := _absolute(config.init)) != config.init:
        sections["init"] = changed["init"] = init
    return config.model_copy(update=sections), {key: _text(v) for key, v in changed.items()}


def _with_absolute(
    values: dict[str, Any], above: str, is_path: Callable[[str], bool], changed: dict[str, Any]
) -> dict[str, Any]:
    """Replace paths in a mapping, and note those that change by dotted key."""
    found = {}
    for name, value in values.items():
        key = f"{above}.{name}"
        if isinstance(value, dict):
            found[name] = _with_absolute(value, key, is_path, changed)
            continue
        new = found[name] = _absolute(value) if is_path(key) else value
        if new != value:
            changed[key] = new
    return found


def _absolute(value: Any) -> Any:  # noqa: ANN401 - any setting
    """Make a path absolute, or each of a list."""
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    is_there = isinstance(value, str) and exists(value)
    return str(expanded(value).absolute()) if is_there else value


def _text(value: object) -> str:
    """Write a path, or several, so that Hydra's grammar reads exactly it."""
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list) else quote(value)
