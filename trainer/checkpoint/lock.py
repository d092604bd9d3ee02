"""One process holds a run at a time.

The lock is `flock` on `RUN/.lock`: the system frees it when its holder ends, however it ends, so a
lock file that lies around means nothing. What the file says is for the error message alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from trainer.core import durable
from trainer.core.errors import SaveError, TrainError

FILE_NAME = ".lock"

_MAX_BYTES = 4096

_held: set[int] = set()
_lent: set[Path] = set()


class RunHeldError(TrainError):
    """Another process has this run in use; like a run that is not there, it cannot be resumed."""

    exit_code = 4


@contextlib.contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep a run folder to this process, and clear away what an earlier crash left unfinished.

    Args:
        run: an existing run folder.

    Raises:
        RunHeldError: another process holds it; the text names that process.
        SaveError: the folder cannot be written to, or its file system knows no locks.
    """
    if run.resolve() in _lent:
        yield
        return
    handle = _open(run / FILE_NAME)
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunHeldError(
                f"{run}: in use by {_holder(handle)}: wait for it, stop it, or start another run"
            ) from error
        except OSError as error:
            raise SaveError(
                f"{run}: cannot be locked on this file system ({error.strerror}): mount it with "
                "flock, or set outputs elsewhere"
            ) from error
        _name_holder(handle)
        durable.clean(run)
        yield
    finally:
        _held.discard(handle)
        with contextlib.suppress(OSError):  # where locks are not known; closing lets go of them
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


@contextlib.contextmanager
def hold_early(run: Path) -> Iterator[None]:
    """Keep a run folder before the command that will ask for it with `hold`, and gets it.

    Raises:
        RunHeldError: as `hold` does.
        SaveError: likewise.
    """
    with hold(run):
        home = run.resolve()
        _lent.add(home)
        try:
            yield
        finally:
            _lent.discard(home)


def is_held(run: Path) -> bool:
    """Tell whether a process, on this machine or another that sees the lock, holds a run."""
    try:
        # A pipe of that name would never open.
        handle = os.open(run / FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        failure = durable.save_error(error, path)
        raise failure from error


def _name_holder(handle: int) -> None:
    """Say who holds the lock, where the disk has room for it; the lock holds without."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, _MAX_BYTES, 0))
        return f"process {int(holder['pid'])} on {str(holder['host'])!r:.80}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _let_go_in_child() -> None:
    """A forked child (a loader worker) that outlives its parent must not keep the run."""
    for handle in _held:
        os.close(handle)
    _held.clear()
    _lent.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
