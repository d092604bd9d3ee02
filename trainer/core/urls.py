"""Say which folder on this machine is the copy of what a URL names, and which URL a copy is of.

All that reads or writes works on copies, below the cache folder; `cli/remote.py` brings and sends.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.core.errors import ConfigError

_MISTYPED = re.compile(r"(s3|gs)//|(\w+):/(?!/)")
_NO_HOST = "_"  # in place of the host of a URL that has none, as `file:///folder`; no host is so


def is_url(typed: str) -> bool:
    """Whether a text, where a path may stand, is a URL; `ConfigError` where it is nearly one."""
    if (meant := _MISTYPED.match(typed)) is not None:
        url = f"{meant[1] or meant[2]}://{typed[meant.end() :]}"
        raise ConfigError(f"{typed}: did you mean {url}? For a folder of this name type ./{typed}")
    return "://" in typed


def cache_folder() -> Path:
    """Name the user's cache folder: `TRAIN_CACHE`, or `step-trainer` below the system's."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    typed = os.environ.get("TRAIN_CACHE") or f"{home}/step-trainer"
    path = Path(os.path.expanduser(typed))  # noqa: PTH111 - of pathlib it raises
    if path.parts[0].startswith("~"):
        raise ConfigError(f"TRAIN_CACHE={typed}: no such user; name a folder")
    return path.absolute()


def copies_folder() -> Path:
    """Name the folder of all copies."""
    return cache_folder() / "storage"


def copy_of(url: str) -> Path:
    """Name the file or folder that is the copy of a URL, which need not be there."""
    scheme, _, rest = url.partition("://")
    parts = [*filter(None, rest.split("/"))]
    if not (scheme and parts) or "/" in scheme or not {".", ".."}.isdisjoint(parts) or "::" in url:
        raise ConfigError(f"{url}: no URL that can be read; write it as s3://bucket/folder")
    if rest.startswith("/"):
        parts.insert(0, _NO_HOST)
    return copies_folder().joinpath(scheme, *parts)


def url_of(path: Path) -> str | None:
    """Give the URL that a path is the copy of; None of any other path."""
    scheme, *parts = os.path.relpath(path, copies_folder()).split("/")
    if scheme == ".." or not parts:
        return None
    return f"{scheme}://{'/'.join(parts)}".replace(f"://{_NO_HOST}/", ":///", 1)
