"""Load the plugins of Hydra that a command line names, and have libraries report home nothing.

Hydra imports every module of `hydra_plugins` when it starts, which with the launchers and sweepers
that are commonly installed takes longer than everything else before a config error is shown.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins

from trainer.config.messages import clip
from trainer.config.option_files import LIBRARIES, data_dir
from trainer.core.errors import ConfigError

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "hydra/launcher": {
        "joblib": "joblib",
        "submitit_local": "submitit",
        "submitit_slurm": "submitit",
    },
}
"""Options that a plugin brings, and which extra of ours installs it."""

SWITCHES: Mapping[str, str] = LIBRARIES["switches"]
"""Environment variables by which libraries report home nothing."""

_PACKAGE = "hydra_plugins"
# Options that need no plugin
_BUILT_IN = {"basic", "none", "default", "disabled", "null"}
_NO_NAME = {"", "hydra", "launcher", "sweeper"}


def switch_off_reports() -> None:
    """Set the variables, for this process and those it starts; one that a user set stays."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def without_plugins() -> None:
    """Make Hydra's registry, if there is none yet; nothing that is installed is imported."""
    before = sys.modules.get(_PACKAGE)
    sys.modules[_PACKAGE] = None  # type: ignore[assignment] # how Python says: not to be found
    try:
        Plugins.instance()
    finally:
        del sys.modules[_PACKAGE]
        if before is not None:
            sys.modules[_PACKAGE] = before


def load_plugins(overrides: Iterable[Override]) -> None:
    """Import and register the plugins that are named, or all where no package is called so."""
    for override in overrides:
        key, _, value = (override.input_line or "").lstrip("+").partition("=")
        # What is below a sweeper's own settings belongs to the sweeper.
        is_named = re.fullmatch(r"hydra/\w+|hydra\.\w+\._target_", key) is not None
        name = value.strip("'\"")
        file = data_dir("conf") / key / f"{name}.yaml"
        # Of pathlib it raises for long names.
        if not is_named or name in _BUILT_IN or os.path.isfile(file):  # noqa: PTH113
            continue
        try:
            places = getattr(import_module(_PACKAGE), "__path__", ())
            installed = [module.name for module in iter_modules(places)]
        except ImportError:
            installed = []
        # An option is named by a word, and a class by its import path.
        words = {*re.split(r"[\W_]+", name.lower())}
        named = list[str]()
        for each in installed:
            if words & ({*each.split("_")} - _NO_NAME):
                named.append(each)
        if not named and name in EXTRAS.get(key, ()):
            remedy = f"pip install '.[{EXTRAS[key][name]}]'"
            raise ConfigError(clip(f"{key}={name}: not installed; {remedy}"))
        registry: Any = Plugins.instance()
        for each in named or installed:
            package = f"{_PACKAGE}.{each}"
            is_known = any(each.startswith(f"{package}.") for each in registry.class_name_to_class)
            module = import_module(package)
            if not is_known and hasattr(module, "__path__"):
                for plugin in registry._scan_all_plugins([module])[0]:
                    registry.register(plugin)
