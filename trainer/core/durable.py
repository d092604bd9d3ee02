"""Write bytes that must survive a crash; every durable write of the program goes through here.

A name never shows half a content, and what a function returned from is on the disk. Both rest on
POSIX: a rename within a folder is atomic, `fsync` of a file makes its bytes durable, `fsync` of a
folder its names. Local file systems keep this; some network ones promise less.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from trainer.core.errors import SaveError
from trainer.core.format import size as shown_size

BytesLike = bytes | memoryview

UNFINISHED = ".tmp-"  # begins the name of what is being written
TRASH = ".trash-"  # begins the name of what is being deleted

# Hashed and written while it is still in the cache
_CHUNK_BYTES = 4 << 20
_MAX_JSON_BYTES = 16 << 20
# In C it takes 3 ms a run, else 24.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_RECORD = 1 << 20  # characters of a file beyond which it is no record of a run


class FileSystem:
    """The operations that change a disk, in one place so that tests can stop, tear or refuse any.

    All raise `OSError`; none retries.
    """

    def make_folder(self, path: Path) -> None:
        """Make one folder whose parent exists; `FileExistsError` if the name is taken."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a new file; never follows a link that lies in wait under its name."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def open_append(self, path: Path) -> int:
        """Open a file, new or not, for writing at its end; never one that a link leads to."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)

    def write(self, handle: int, data: memoryview) -> int:
        """Write some of `data`, and return how many bytes."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Make the bytes of an open file durable."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close an open file."""
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable, where the file system knows how."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network and FUSE file systems order names themselves and refuse the call.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in one step, replacing a file of that name."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove one file, or a link itself."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove one empty folder."""
        path.rmdir()


_in_use: list[FileSystem] = [FileSystem()]


@contextlib.contextmanager
def use(file_system: FileSystem) -> Iterator[None]:
    """Send every durable write of the process, in all threads, to another file system."""
    _in_use.append(file_system)
    try:
        yield
    finally:
        _in_use.remove(file_system)


def write_file(path: Path, pieces: Iterable[BytesLike]) -> tuple[int, str]:
    """Write a new file piece by piece and make its bytes durable, but not yet its name.

    Gives size in bytes and SHA-256 in hex, both taken from the bytes on their way to the disk.
    """
    disk, digest, size = _in_use[-1], hashlib.sha256(), 0
    handle = disk.create(path)
    try:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                _write_all(disk, handle, chunk)
            size += len(view)
        disk.sync(handle)
    finally:
        disk.close(handle)
    return size, digest.hexdigest()


def write_file_atomic(path: Path, data: BytesLike) -> None:
    """Put a content under a name, which shows the old content or the new one and nothing else."""
    write_pieces_atomic(path, [data])


def write_pieces_atomic(path: Path, pieces: Iterable[BytesLike]) -> None:
    """Put a content under a name once all of its pieces are there; each is written as it comes."""
    unfinished = _unfinished(path)
    try:
        write_file(unfinished, pieces)
        rename(unfinished, path)
    except BaseException:  # what makes the pieces may raise anything
        discard(unfinished)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put a JSON object under a name, as `write_file_atomic` does; NaN and infinity become null."""
    text = json.dumps(strict(content), indent=2, allow_nan=False)
    write_file_atomic(path, f"{text}\n".encode())


def strict(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Replace every number that JSON does not know (NaN, infinities) by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(strict, value)]
    return value


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a run folder, as `write_json` does; `SaveError` if the disk refuses."""
    with as_save_error(path):
        write_json(path, content)


def parsed(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Read JSON that anyone may have written; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a run folder, perhaps a stranger's; empty where there is none."""
    with contextlib.suppress(OSError):
        # A pipe would never end.
        if path.is_file():
            with path.open("rb") as file:
                content = parsed(file.read(_MAX_JSON_BYTES))
            if isinstance(content, dict):
                return content
    return {}


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - any YAML
    """Read a record of a run, perhaps a stranger's; `ValueError` if it is no such record."""
    with path.open(encoding="utf-8") as file:
        content = file.read(_MAX_RECORD + 1)
    # Ten levels of aliases stand for ten billion values.
    tokens = yaml.scan(content, Loader=_LOADER)
    has_alias = any(isinstance(token, yaml.AliasToken) for token in tokens)
    if len(content) > _MAX_RECORD or has_alias:
        raise ValueError("not a record of a run")
    # As `yaml.safe_load` does, with the loader in C.
    return _LOADER(content).get_single_data()


def append(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Add whole lines to a log; a crash may leave a part of them. `durable` waits for the disk."""
    disk = _in_use[-1]
    handle = disk.open_append(path)
    try:
        _write_all(disk, handle, memoryview(data))
        if durable:
            disk.sync(handle)
    finally:
        disk.close(handle)


def open_log(path: Path) -> TextIO:
    """Open a text file, new or not, to add lines; never a link's target, nor a pipe."""
    # With O_NONBLOCK a pipe that nobody reads is refused; else opening it waits for ever.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8", errors="backslashreplace")


def make_folders(path: Path) -> None:
    """Make a folder and the parents that are missing, durably; fine if it exists."""
    if path.is_dir():
        return
    make_folders(path.parent)
    disk = _in_use[-1]
    try:
        disk.make_folder(path)
    except FileExistsError:
        # Another rank may have made it meanwhile.
        if not path.is_dir():
            raise
    disk.sync_folder(path.parent)


def make_own_folder(path: Path) -> None:
    """Make a folder that its owner alone may enter, where it is missing, and its parents."""
    if not path.is_dir():
        make_folders(path)
        path.chmod(0o700)


def begin_folder(path: Path) -> Path:
    """Make an unfinished folder, to be published under a name, and the parents that are missing."""
    make_folders(path.parent)
    unfinished = _unfinished(path)
    _in_use[-1].make_folder(unfinished)
    return unfinished


def publish_folder(unfinished: Path, final_path: Path) -> None:
    """Give a folder whose files are durable its final name, in the same parent, durably.

    Refuses a name that is taken: rename would replace an empty folder in silence.
    """
    # First the names of its files: no crash may show the folder without some of them.
    _in_use[-1].sync_folder(unfinished)
    if os.path.lexists(final_path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final_path))
    rename(unfinished, final_path)


def rename(source: Path, target: Path) -> None:
    """Rename within a folder, durably."""
    disk = _in_use[-1]
    disk.rename(source, target)
    disk.sync_folder(target.parent)


def remove(path: Path) -> None:
    """Delete a folder so that a crash never leaves a part of it under its name."""
    # A rename is one step, and to delete what a folder holds takes many.
    trash = path.with_name(f"{TRASH}{path.name}-{uuid.uuid4().hex}")
    rename(path, trash)
    _remove_tree(trash)


def discard(path: Path) -> None:
    """Delete an unfinished file or folder if that is possible; `clean` finds what is left."""
    with contextlib.suppress(OSError):
        _remove_tree(path)


def clean(folder: Path) -> None:
    """Delete what earlier crashes left unfinished in a folder. Only for who holds the run."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith((UNFINISHED, TRASH)):
            discard(path)


@contextlib.contextmanager
def as_save_error(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what the disk refuses inside into a `SaveError` of one line."""
    try:
        yield
    except OSError as error:
        raise save_error(error, path, needed) from error


def save_error(error: OSError, path: Path, needed: int | None = None) -> SaveError:
    """Put into one line which write failed, why, and what to do; `needed` is its size in bytes."""
    why = error.strerror or str(error) or type(error).__name__
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return SaveError(f"{path}: could not be written: {why}")
    # The nearest that exists: the disk may have refused to make the others.
    folder = next(each for each in path.absolute().parents if each.is_dir())
    room = f"{shown_size(shutil.disk_usage(folder).free)} free"
    need = f"needs {shown_size(needed)}, " if needed is not None else ""
    return SaveError(
        f"{path}: could not be written: {why} ({need}{room}): make room, lower checkpoint.keep, "
        "or set outputs to another disk; nothing older was touched"
    )


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{UNFINISHED}{path.name}-{uuid.uuid4().hex}")


def _write_all(disk: FileSystem, handle: int, data: memoryview) -> None:
    while data:
        # The system may take less than all, as where a disk fills up.
        data = data[disk.write(handle, data) :]


def _remove_tree(path: Path) -> None:
    """Delete a file, a link (not what it points to), or a folder with all it contains."""
    disk = _in_use[-1]
    if not stat.S_ISDIR(path.lstat().st_mode):
        disk.unlink(path)
        return
    for inner in sorted(path.iterdir()):
        _remove_tree(inner)
    disk.remove_folder(path)
