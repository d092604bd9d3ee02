"""The index of a document data set: one file, built once, memory-mapped ever after.

Layout, little-endian: the documents' bytes end to end, padding to 8, `num_documents + 1` int64
offsets into them, one uint64 key per document, a JSON footer, the footer's SHA-256, its length
and a magic number. The footer carries digests of the rest, so that a file cut short or damaged
is found when it is opened, and built again.

The file appears under its name in one rename, so that builders may race: each reader maps one
whole file and keeps it, whatever happens to the name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import struct
import tempfile
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import numpy.typing as npt

from trainer.core.errors import DataError
from trainer.data.holdout import KeyArray
from trainer.plan.cut import IntArray

_MAGIC = b"TRAINIX1"
_TRAILER = struct.Struct("<32sQ8s")
_FULLY_CHECKED_BYTES = 256 * 2**20
"""Up to here the documents' digest is checked at every opening, beyond it only their size: an
opening may cost a fraction of a second, not a reading of the whole corpus."""

LISTED_SKIPS = 100
"""Most skipped records whose reason is kept among the notes."""

_log = logging.getLogger(__name__)

SKIP_CAP = 0.01
"""Largest share of bad records that `data.on_bad=skip` passes over; one is always allowed."""

Add = Callable[[bytes, bytes], None]
"""Adds one document: its bytes, and what it is grouped by when a split is drawn."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """An open index.

    Attributes:
        path: the file that is mapped.
        key: what the index was built from.
        blob: `(bytes,)`, all documents end to end.
        offsets: `(documents + 1,)`, where each begins and the last one ends.
        groups: `(documents,)`; documents that share one must fall into the same split.
        digest: SHA-256 of everything above, `path` and `key` aside.
        notes: what the builder had to say, e.g. how many records it skipped.
    """

    path: Path
    key: str
    blob: npt.NDArray[np.uint8]
    offsets: IntArray
    groups: KeyArray
    digest: str
    notes: Mapping[str, Any]

    def __reduce__(self) -> tuple[Callable[[Path, str], Index], tuple[Path, str]]:
        return _reopen, (self.path, self.key)


def cached_index(name: str, key: str, build: Callable[[Add], Mapping[str, Any]]) -> Index:
    """Open the index of this name, building it first where there is none, or another, or half.

    Args:
        name: file name without suffix; an index of another `key` under it is replaced.
        key: names everything the contents depend on.
        build: is given a function that adds a document, and returns the notes. It must turn its
            own OSError into something else: one that leaves it counts as a failure to write.

    Raises:
        DataError: the index cannot be written, neither to the cache nor to the temporary folder.
    """
    folder = cache_folder()
    index = _open_or_none(folder / f"{name}.index", key)
    if index is not None:
        return index
    path = _writable(folder) / f"{name}.index"
    if path.parent != folder:
        index = _open_or_none(path, key)
        if index is not None:
            return index
    _write(path, key, build)
    return _reopen(path, key)


def cache_folder() -> Path:
    """Name the user's cache folder: `TRAIN_CACHE`, or `step-trainer` below the system's."""
    if typed := os.environ.get("TRAIN_CACHE"):
        return Path(typed).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "step-trainer"
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "step-trainer"
    return _temporary_folder()


def _writable(folder: Path) -> Path:
    """Give the folder, created, or the temporary one where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        fallback = _temporary_folder()
        _log.warning("cannot write to the cache %s (%s); using %s", folder, error, fallback)
        return fallback


def _temporary_folder() -> Path:
    """Make a folder that is this user's alone: the parent is shared by all users."""
    path = Path(tempfile.gettempdir()) / f"step-trainer-{os.getuid()}"
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            return path
    return Path(tempfile.mkdtemp(prefix="step-trainer-"))


def _write(path: Path, key: str, build: Callable[[Add], Mapping[str, Any]]) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                _write_contents(file, key, build)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(
            f"data: cannot write the index {path}: {error}; name another folder in TRAIN_CACHE"
        ) from error


def _write_contents(file: BinaryIO, key: str, build: Callable[[Add], Mapping[str, Any]]) -> None:
    offsets, groups = array("q", [0]), array("Q")
    blob_digest = hashlib.sha256()

    def add(document: bytes, group: bytes) -> None:
        file.write(document)
        blob_digest.update(document)
        offsets.append(offsets[-1] + len(document))
        groups.append(int.from_bytes(hashlib.blake2b(group, digest_size=8).digest(), "little"))

    notes = build(add)
    arrays = np.array(offsets, dtype="<i8").tobytes() + np.array(groups, dtype="<u8").tobytes()
    file.write(bytes(-offsets[-1] % 8) + arrays)
    footer = {
        "key": key,
        "num_documents": len(groups),
        "num_bytes": offsets[-1],
        "blob_sha256": blob_digest.hexdigest(),
        "arrays_sha256": hashlib.sha256(arrays).hexdigest(),
        "notes": dict(notes),
    }
    encoded = json.dumps(footer).encode()
    digest = hashlib.sha256(encoded).digest()
    file.write(encoded + _TRAILER.pack(digest, len(encoded), _MAGIC))


def _reopen(path: Path, key: str) -> Index:
    """Open an index that must be there.

    Raises:
        DataError: it is gone, damaged, or another by now.
    """
    index = _open_or_none(path, key)
    if index is None:
        raise DataError(f"data: the index {path} was removed or replaced while in use; run again")
    return index


def _open_or_none(path: Path, key: str) -> Index | None:
    try:
        return _open(path, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        _log.warning("the index %s cannot be used (%s) and is built again", path, error)
        return None


def _open(path: Path, key: str) -> Index | None:
    """Map and check an index; `None` if it is sound but of another key.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    footer, end = _read_footer(mapped)
    if footer["key"] != key:
        return None
    count, num_bytes = footer["num_documents"], footer["num_bytes"]
    begin = num_bytes + -num_bytes % 8
    if end != begin + 8 * (2 * count + 1):
        raise ValueError("wrong size")
    _check("arrays", mapped[begin:end], footer["arrays_sha256"])
    if num_bytes <= _FULLY_CHECKED_BYTES:
        _check("documents", mapped[:num_bytes], footer["blob_sha256"])
    contents = footer["arrays_sha256"] + footer["blob_sha256"]
    return Index(
        path=path,
        key=key,
        blob=mapped[:num_bytes],
        offsets=mapped[begin : begin + 8 * (count + 1)].view("<i8"),
        groups=mapped[begin + 8 * (count + 1) : end].view("<u8"),
        digest=hashlib.sha256(contents.encode()).hexdigest(),
        notes=footer["notes"],
    )


def _read_footer(mapped: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """Read and check the footer.

    Returns:
        The footer, and where it begins.

    Raises:
        ValueError: it is damaged.
    """
    if len(mapped) < _TRAILER.size:
        raise ValueError("cut short")
    digest, size, magic = _TRAILER.unpack(mapped[-_TRAILER.size :].tobytes())
    begin = len(mapped) - _TRAILER.size - size
    if magic != _MAGIC or begin < 0:
        raise ValueError("cut short, or not an index")
    encoded = mapped[begin : begin + size].tobytes()
    if hashlib.sha256(encoded).digest() != digest:
        raise ValueError("damaged footer")
    footer: dict[str, Any] = json.loads(encoded)
    return footer, begin


def _check(what: str, part: npt.NDArray[np.uint8], digest: str) -> None:
    if hashlib.sha256(part.data).hexdigest() != digest:
        raise ValueError(f"damaged {what}")
