"""Refuse folders, perhaps a stranger's, that lead elsewhere or hold what is no file."""

from __future__ import annotations

import os
import stat
from itertools import chain
from pathlib import Path

from trainer.config.messages import clip
from trainer.core.errors import NoCheckpointError

WANDB_LINK = "debug-core.log"
"""W&B leaves a link of this name to its own log, outside; nothing is ever written through it."""


def refuse_odd_files(folder: Path, *, links: bool = True) -> None:
    """Refuse a folder, perhaps a stranger's, that leads elsewhere, or that reading waits for.

    It has a link that leads out of it, or a pipe or a device. Caches of downloads hold such links:
    they pass without `links`.
    """
    home = folder.resolve()
    names = ((parent, name) for parent, *inner in os.walk(folder) for name in chain(*inner))
    for path in (Path(*each) for each in names):
        if path.is_symlink():
            is_foreign = not path.resolve().is_relative_to(home)
            if links and is_foreign and path.name != WANDB_LINK:
                raise NoCheckpointError(clip(f"{path}: a link that leads out of the folder"))
        elif stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise NoCheckpointError(clip(f"{path}: neither a file nor a folder"))
