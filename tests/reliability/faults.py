"""A disk that fails at a chosen operation, in a chosen way."""

import errno
import os
import signal
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.core.durable import FileSystem

Fault = Literal["kill", "kill halfway", "ENOSPC", "ENOSPC for good", "EIO", "EIO for good", "short"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Killed(BaseException):
    """The process is dead: from here on its disk does nothing, so no clean-up code can help."""


class FaultyDisk(FileSystem):
    """Passes operations on to the disk, and fails at operation number `point`.

    `kill` strikes before the operation, `kill halfway` within a write or after anything else;
    `ENOSPC` and `EIO` refuse it, once or from then on (a full disk still deletes); `short` takes
    half of a write and says so. With `for_real` a kill is SIGKILL to this very process. Syncs are
    counted and left out: the page cache outlives any process, and power loss has its own harness.
    """

    def __init__(self, point: int = -1, fault: Fault = "kill", *, for_real: bool = False) -> None:
        self.point, self.fault, self.for_real = point, fault, for_real
        self.operations: list[str] = []
        self.struck = self._dead = False

    def make_folder(self, path: Path) -> None:
        self._do("make_folder", path)

    def create(self, path: Path) -> int:
        return self._do("create", path)

    def open_append(self, path: Path) -> int:
        return self._do("open_append", path)

    def write(self, handle: int, data: memoryview) -> int:
        is_cut = self._is_next() and self.fault in {"kill halfway", "short"}
        return self._do("write", handle, data[: max(1, len(data) // 2)] if is_cut else data)

    def sync(self, handle: int) -> None:
        self._do("sync", handle)

    def close(self, handle: int) -> None:
        super().close(handle)
        if self._dead:
            raise Killed

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", path)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", source, target)

    def unlink(self, path: Path) -> None:
        self._do("unlink", path)

    def remove_folder(self, path: Path) -> None:
        self._do("remove_folder", path)

    def die(self) -> None:
        """Be the disk of a process that was killed."""
        if self.for_real:
            os.kill(os.getpid(), signal.SIGKILL)
        self._dead = True
        raise Killed

    def _is_next(self) -> bool:
        return len(self.operations) == self.point

    def _do(self, operation: str, *arguments: Any) -> Any:
        if self._dead:
            raise Killed
        here, self.struck = self._is_next(), self.struck or self._is_next()
        self.operations.append(operation)
        if here and self.fault == "kill":
            self.die()
        if here or (self.struck and "for good" in self.fault):
            self._refuse(operation)
        is_sync = operation in {"sync", "sync_folder"}
        result = None if is_sync else getattr(FileSystem, operation)(self, *arguments)
        if here and self.fault == "kill halfway":
            self.die()
        return result

    def _refuse(self, operation: str) -> None:
        code = getattr(errno, self.fault.split()[0], None)
        frees = operation in {"unlink", "remove_folder", "sync_folder"}
        if code is not None and not (code == errno.ENOSPC and frees):
            raise OSError(code, os.strerror(code))
