"""Let one process use a run at a time.

The lock is `flock` on `RUN/.lock`: the system frees it when its holder ends, however it ends, so a
lock file that lies around means nothing. What the file says is for the error message alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.core import durable
from trainer.core.errors import TrainError

LOCK_FILE = ".lock"

_handles: dict[Path, int] = {}
"""By run folder, the lock files that this process has locked."""


class RunInUseError(TrainError):
    """Another process has this run in use; like a run that is not there, it cannot be resumed."""

    exit_code = 4


@contextlib.contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep a run folder to this process, and clear away what an earlier crash left unfinished.

    Within this process it may be held again: the command line holds a run whose records it
    changes, and then the command does. `RunInUseError` names another process that holds it.
    """
    home = run.resolve()
    if home in _handles:
        yield
        return
    path = run / LOCK_FILE
    with durable.as_save_error(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    _handles[home] = handle
    try:
        with durable.as_save_error(path):
            _lock(handle, run)
        with contextlib.suppress(OSError):  # on a full disk the lock works without a name in it
            os.ftruncate(handle, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            os.write(handle, json.dumps(holder).encode())
        durable.clean(run)
        durable.clean(run / "checkpoints")
        yield
    finally:
        _handles.pop(home, None)
        with contextlib.suppress(OSError):  # where locks are not known; closing lets go of them
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def is_locked(run: Path) -> bool:
    """Tell whether a process, on this machine or another that sees the lock, uses a run."""
    try:
        # A pipe of that name would never open.
        handle = os.open(run / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


def _lock(handle: int, run: Path) -> None:
    """Take the lock, or wait half a second: the last child of a killed process may have it."""
    ends = time.monotonic() + 0.5
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > ends:
                remedy = "wait for it, stop it, or start another run"
                raise RunInUseError(f"{run}: in use by {_holder(handle)}: {remedy}") from error
        time.sleep(0.01)


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(holder['pid'])} on {str(holder['host'])!r:.80}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _close_in_child() -> None:
    """A forked child (a loader worker) that outlives its parent must not keep the run."""
    for handle in _handles.values():
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_in_child)
