"""Say where the copy lies, on this machine, of what a URL names, and which URL a copy is of.

All that reads or writes works on copies, below the user's cache folder. What a URL names is brought
there, and runs are sent from there, by the feature that `conf/storage.yaml` names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.core.errors import ConfigError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_COPIES = "storage"  # in the cache folder


def is_url(typed: str) -> bool:
    """Whether a text, where a path may stand, is a URL such as `s3://bucket/runs`."""
    return _URL.fullmatch(typed) is not None


def cache_folder() -> Path:
    """Name the user's cache folder: `TRAIN_CACHE`, or `step-trainer` below the system's."""
    if typed := os.environ.get("TRAIN_CACHE"):
        path = Path(os.path.expanduser(typed))  # noqa: PTH111 - of pathlib it raises
        if path.parts[0].startswith("~"):
            raise ConfigError(f"TRAIN_CACHE={typed}: no such user; name a folder")
        return path.absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(home)) / "step-trainer"  # noqa: PTH111 - as above


def copies_folder() -> Path:
    """Name the folder of all copies."""
    return cache_folder().absolute() / _COPIES


def copy_of(url: str) -> Path:
    """Name the file or folder that is the copy of a URL, which need not be there."""
    scheme, rest = _URL.fullmatch(url).groups()  # type: ignore[union-attr] # `is_url` holds
    parts = [part for part in rest.split("/") if part not in {"", "."}]
    if not parts or ".." in parts or "::" in url:
        raise ConfigError(f"{url}: no URL that can be read; write it as s3://bucket/folder")
    return copies_folder().joinpath(scheme, *parts)


def url_of(path: Path) -> str | None:
    """Give the URL that a path is the copy of; None of any other path."""
    try:
        scheme, *parts = path.absolute().relative_to(copies_folder()).parts
    except ValueError:
        return None
    start = "/" if scheme == "file" else ""
    return f"{scheme}://{start}{'/'.join(parts)}" if parts else None
