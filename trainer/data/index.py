"""Cache the documents of a corpus as memory-mapped arrays: built once, opened ever after.

An index is a folder: `documents.bin` holds the bytes of all documents end to end, `offsets.bin`
(int64, little-endian) where each begins, `groups.bin` (uint64) what must stay on one side of a
split, and `index.json` the key of the corpus and the digests of the arrays. It is written under a
temporary name and renamed once; of several processes one builds it, and the others wait for that.
One that is torn or damaged fails its digests and is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from trainer.config.messages import first_of
from trainer.core import signals
from trainer.core.durable import make_own_folder
from trainer.core.errors import DataError
from trainer.core.urls import cache_folder
from trainer.data.samples import KeyArray
from trainer.plan.cut import IntArray

CHECKED_BYTES = 256 * 2**20
"""Up to here the documents' digest is checked at every opening, beyond it only their size: an
opening may cost a fraction of a second, not a reading of the whole corpus."""

LISTED_SKIPS = 100
"""Most skipped records whose reason is listed."""

SKIP_CAP = 0.01
"""Largest share of bad records that `data.on_bad=skip` passes over; one is always allowed."""

WAIT_S = 0.1
"""Seconds between two looks at whether another process has built the index."""

Add = Callable[[bytes, bytes], None]
"""Adds one document: its bytes, and what it is grouped by when a split is drawn."""

Build = Callable[[Add], tuple[Sequence[str], Mapping[str, Any]]]
"""Adds all documents of a corpus, says why records were left out, and what else is known of all."""

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, eq=False)
class Index:
    """An open index; pickled as its path and key."""

    path: Path  # its folder
    key: str  # what the index was built from
    blob: npt.NDArray[np.uint8]  # `(bytes,)` uint8, all documents end to end
    offsets: IntArray  # `(documents + 1,)`, where each begins and the last one ends
    groups: KeyArray  # `(documents,)`; documents that share one must fall into the same split
    digest: str  # SHA-256 of the three arrays
    num_skipped: int  # records that were left out
    skipped: tuple[str, ...]  # why the first of them were
    facts: Mapping[str, Any]  # what else is known of all documents

    def __reduce__(self) -> tuple[Callable[[Path, str], Index], tuple[Path, str]]:
        return _open, (self.path, self.key)

    def entry(self, document: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Give what is stored of a document, as numbers."""
        first, last = self.offsets[document : document + 2].tolist()
        found: npt.NDArray[Any] = self.blob[first:last].view(dtype)
        return found


def cached_index(
    kind: str, settings: str, files: Mapping[str, os.stat_result], build: Build, *, reader: str = ""
) -> Index:
    """Open the index of a corpus, building it first where there is none, or a damaged one.

    One index is kept for each `kind` and `settings`. It is built anew where a file has another
    name, size or time, or the `reader` another version. `build`
    must turn its own OSError into something else: one that leaves it counts as a failure to write.
    """
    name = f"{kind}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    hashed = hashlib.sha256(f"{reader}|{settings}".encode())
    for file, status in files.items():
        hashed.update(f"|{file}|{status.st_size}|{status.st_mtime_ns}".encode())
    key = hashed.hexdigest()
    path = cache_folder() / f"{name}-{key[:16]}"
    if os.path.isdir(path):  # noqa: PTH112 - of pathlib it raises for long names
        try:
            return _open(path, key)
        except DataError as error:
            _log.warning("%s: rebuilding the index", error)
            shutil.rmtree(path, ignore_errors=True)
    try:
        make_own_folder(path.parent)
        with _locked(path.parent / f".{path.name}.lock"):
            if not path.exists():  # else another process was first
                _write(path, key, build)
    except OSError as error:
        raise DataError(
            f"data: cannot write the index {path} ({error}); name another folder in TRAIN_CACHE"
        ) from error
    # Of the same corpus before it changed: its documents would fill the disk.
    for older in path.parent.glob(f"{name}-*"):
        if older != path:
            shutil.rmtree(older, ignore_errors=True)
    return _open(path, key)


def refuse_many(bad: Sequence[str], total: int) -> None:
    """Refuse data of which more records are bad, each with its reason, than may be skipped."""
    if len(bad) > max(1, SKIP_CAP * total):
        raise DataError(
            f"data: {len(bad)} of {total} records are bad, more than the {SKIP_CAP:.0%} that "
            f"data.on_bad=skip allows; mend or remove them: {first_of(bad)}"
        )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock while an index is built; of other processes, wait for it."""
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                signals.check()
                time.sleep(WAIT_S)
        try:
            yield
        finally:
            # One who waits has the file open, and locks what has no name any more: it finds the
            # index there. One who comes later makes a file anew.
            file.unlink(missing_ok=True)


def _write(path: Path, key: str, build: Build) -> None:
    offsets, groups = array("q", [0]), array("Q")
    digest = hashlib.sha256()
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        with (folder / "documents.bin").open("wb") as file:

            def add(document: bytes, group: bytes) -> None:
                file.write(document)
                digest.update(document)
                offsets.append(offsets[-1] + len(document))
                # 64 bits of a hash stand for a group: those of two distinct ones are the same for
                # one in 10^7 corpora of a million documents.
                draw = hashlib.blake2b(group, digest_size=8).digest()
                groups.append(int.from_bytes(draw, "little"))

            skipped, facts = build(add)
            about: dict[str, Any] = {"key": key, "num_skipped": len(skipped), "facts": facts}
            about["skipped"] = skipped[:LISTED_SKIPS]
            file.flush()
            # Past CHECKED_BYTES nothing would notice bytes that are lost
            os.fsync(file.fileno())
        arrays = np.array(offsets, dtype="<i8"), np.array(groups, dtype="<u8")
        arrays[0].tofile(folder / "offsets.bin")
        arrays[1].tofile(folder / "groups.bin")
        about |= {"documents": digest.hexdigest(), "arrays": _sha256(*arrays)}
        (folder / "index.json").write_text(json.dumps(about))
        # Raised where another builder was first, with the same documents.
        with suppress(OSError):
            folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open(path: Path, key: str) -> Index:
    """Map and check an index; a DataError where it is gone, damaged, or that of another corpus."""
    try:
        about = json.loads((path / "index.json").read_bytes())
        blob = np.asarray(np.memmap(path / "documents.bin", np.uint8, mode="r"))
        offsets = np.asarray(np.memmap(path / "offsets.bin", "<i8", mode="r"))
        groups = np.asarray(np.memmap(path / "groups.bin", "<u8", mode="r"))
        is_whole = (
            (about["key"], about["arrays"]) == (key, _sha256(offsets, groups))
            and (len(groups), int(offsets[0]), int(offsets[-1])) == (len(offsets) - 1, 0, len(blob))
            and (len(blob) > CHECKED_BYTES or about["documents"] == _sha256(blob))
        )
        digest = hashlib.sha256((about["arrays"] + about["documents"]).encode()).hexdigest()
        skipped = about["num_skipped"], tuple(about["skipped"])
        index = Index(path, key, blob, offsets, groups, digest, *skipped, about["facts"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"data: the index {path} cannot be read ({error}); run again") from error
    if not is_whole:
        raise DataError(f"data: the index {path} is damaged; run again")
    return index


def _sha256(*arrays: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(values.data)
    return digest.hexdigest()
