"""Make the folder of one attempt: on this machine, this user's alone, gone when it is over.

A supervisor that is killed cannot take its folder away, so the next one does. Each holds a lock on
its own, which the system frees however its holder ends; process ids would mean nothing to another
container that shares the folder for temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "train-"
LOCK_FILE = "held"


@contextmanager
def attempt_folder() -> Iterator[Path]:
    """Make a folder, and take away those of this user's supervisors that were killed.

    Yields:
        The folder.
    """
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        new = Path(name) / f"{LOCK_FILE}-soon"
        with new.open("w") as handle:
            # Locked before it has its name, so that no other sweep finds it unlocked.
            fcntl.flock(handle, fcntl.LOCK_EX)
            new.rename(Path(name) / LOCK_FILE)
            yield Path(name)


def sweep(place: Path) -> None:
    """Delete the folders of this user whose lock nobody holds any more."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                with (folder / LOCK_FILE).open() as handle:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
