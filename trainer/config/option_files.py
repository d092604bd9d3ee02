"""Read the files of `conf/`: the groups of options, and which is the default of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

OWN = "own"
"""The option of every component that names no class: the user does."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was compiled


def data_dir(name: str) -> Path:
    """Find `conf` or `recipes`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name}/ is neither in {package} nor beside it")


def load_yaml(file: Path) -> dict[str, Any]:
    """Read one file of options; empty where it is missing, or no mapping."""
    content = _LOADER(file.read_text()).get_single_data() if file.is_file() else None
    return content if isinstance(content, dict) else {}


def options_of(group: str, own: str | None = None) -> dict[str, dict[str, Any]]:
    """Read the options of a group by name, that for classes typed left out.

    `own` is the folder of the user's options, whose are read beside those that are built in.
    """
    folders = [data_dir("conf"), *([Path(own)] if own else [])]
    files = [f for each in folders for f in sorted((each / group.replace(".", "/")).glob("*.yaml"))]
    return {file.stem: load_yaml(file) for file in files if file.stem != OWN}


def default_options(conf: Path) -> dict[str, str]:
    """Name the default option of every group, by dotted key, as the primary config chooses it."""
    entries = load_yaml(conf / "config.yaml").get("defaults", ())
    chosen = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {str(group).replace("/", "."): str(option) for group, option in chosen}


LIBRARIES = load_yaml(data_dir("conf") / "libraries.yaml")
"""What the engine is told of libraries that it does not import."""
