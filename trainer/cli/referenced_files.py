"""Check files and folders that a config names, before anything is started or torch is imported."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainer.config.messages import clip
from trainer.config.run_config import RunConfig
from trainer.core.errors import DataError, NoCheckpointError

WANDB_LINK = "debug-core.log"
"""W&B leaves a link of this name to its own log, outside; nothing is ever written through it."""


def refuse_missing(config: RunConfig) -> None:
    """Refuse a run whose data or weights are not there.

    Raises:
        DataError: there is nothing at `data.path`.
        NoCheckpointError: there is nothing at `init`, or what `refuse_odd_files` refuses.
    """
    path = config.data.params.get("path")
    is_ours = config.data.target.startswith("trainer.") and isinstance(path, str)
    if is_ours and not _exists(str(path)):
        raise DataError(clip(f"data.path={path}: no such file or folder"))
    if config.init is not None:
        if not _exists(config.init):
            raise NoCheckpointError(clip(f"init={config.init}: no such file or folder"))
        source = Path(config.init).expanduser()
        refuse_odd_files(source, links=(source / "config.yaml").exists())


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))  # noqa: PTH110, PTH111 - of pathlib some raise


def refuse_odd_files(folder: Path, *, links: bool = True) -> None:
    """Refuse a folder, perhaps a stranger's, that leads elsewhere, or that reading waits for.

    Args:
        folder: a run, or any other files.
        links: whether to refuse links that lead out of it, as caches of downloads hold them.

    Raises:
        NoCheckpointError: a link in it leads out of it, or a file is a pipe or a device.
    """
    home = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink():
                is_foreign = not path.resolve().is_relative_to(home)
                if links and is_foreign and path.name != WANDB_LINK:
                    raise NoCheckpointError(clip(f"{path}: a link that leads out of the folder"))
            elif stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise NoCheckpointError(clip(f"{path}: neither a file nor a folder"))
