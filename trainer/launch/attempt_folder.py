"""The private folder of one attempt: on this machine, this user's alone, gone when it is over.

A supervisor that is killed cannot take its folder away, so the next one does. Each holds a lock on
its own, which the system frees however its holder ends; process ids would mean nothing to another
container that shares the folder for temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.launch.rank import JOB_FILE

PREFIX = "train-"
LOCK_FILE = "held"

UNLOCKED_S = 86400.0
"""How old a folder without a lock is before it counts as left behind: by a version without them."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder, and take away those of this user's supervisors that were killed.

    Yields:
        The folder.
    """
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Under its name it is never seen without being held.
        with (folder / f"{LOCK_FILE}-soon").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            (folder / f"{LOCK_FILE}-soon").rename(folder / LOCK_FILE)
            yield folder


def sweep(place: Path) -> None:
    """Delete the folders of this user that nobody holds any more."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if _is_unlocked(folder):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / LOCK_FILE).open() as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked(folder: Path) -> bool:
    """Whether a folder holds a job that is old, and no lock; anything else may be the user's."""
    names = {path.name for path in folder.iterdir()}
    if JOB_FILE not in names or LOCK_FILE in names:
        return False
    last = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() > last + UNLOCKED_S
