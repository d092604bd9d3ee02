"""Read the files of `conf/`: the groups of options, and which is the default of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

OWN = "own"  # the option of every component that names no class: the user does
# Ten times as fast, where it was compiled
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def data_dir(name: str) -> Path:
    """Find `conf` or `recipes`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name}/ is neither in {package} nor beside it")


def load_yaml(file: Path) -> dict[str, Any]:
    """Read one file of options; empty where it is missing, or no mapping."""
    if not file.is_file():
        return {}
    content = _LOADER(file.read_text()).get_single_data()
    return content if isinstance(content, dict) else {}


@cache
def options_of(group: str, own: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """Read the options of a group by name, that for classes typed left out.

    `own` is the folder of the user's options, whose are read beside those that are built in.
    """
    options = dict[str, dict[str, Any]]()
    for folder in filter(None, (str(data_dir("conf")), own)):
        for file in sorted(Path(folder, group.replace(".", "/")).glob("*.yaml")):
            # The user's option of a name takes the place of the built-in one.
            if file.stem != OWN:
                options[file.stem] = load_yaml(file)
    return options


@cache
def default_options(conf: Path) -> Mapping[str, str]:
    """Name the default option of every group, by dotted key, as the primary config chooses it."""
    chosen = dict[str, str]()
    for entry in load_yaml(conf / "config.yaml").get("defaults", ()):
        # A word alone, as `_self_`, is no choice of an option.
        if isinstance(entry, dict):
            for group, option in entry.items():
                chosen[str(group).replace("/", ".")] = str(option)
    return chosen


LIBRARIES = load_yaml(data_dir("conf") / "libraries.yaml")
"""What the engine is told of libraries that it does not import."""
