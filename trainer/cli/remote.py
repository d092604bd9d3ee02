"""Bring what a URL names to its copy on this machine, and send runs there, by a feature."""

from __future__ import annotations

import pkgutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from trainer.config.option_files import LIBRARIES
from trainer.core.urls import url_of


def bring(path: Path, *, whole: bool = True) -> bool:
    """Bring what the store has newer, or what lists runs; gives whether it answered."""
    brings = LIBRARIES["storage"]["bring"]
    return url_of(path) is None or bool(pkgutil.resolve_name(brings)(path.absolute(), whole))


def sent(folder: Path) -> AbstractContextManager[None]:
    """Give a context in which a run's folder is sent as it grows, if it is the copy of a URL."""
    found: AbstractContextManager[None] = nullcontext()
    if url_of(folder) is not None:
        found = pkgutil.resolve_name(LIBRARIES["storage"]["sent"])(folder)
    return found
