"""Whether a checkpoint's folder holds exactly what was written, bit for bit.

Several ranks deal the files among themselves: each reads some, and all of them together all.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import DamagedError, Manifest


def verify(path: Path, step: int | None = None, *, rank: int = 0, size: int = 1) -> Manifest:
    """Check that a checkpoint's folder holds exactly what was written, bit for bit.

    Args:
        path: its folder.
        step: the step it must be of; `None` accepts any.
        rank: which share of the files to read; names and sizes are checked of all.
        size: how many shares there are; all of them together are the whole checkpoint.

    Raises:
        DamagedError: it does not.
        NewerFormatError: it is whole, and of another format version.
        OSError: it cannot be read.
    """
    manifest = _manifest(path, entries := _entries(path))
    if step is not None and manifest.step != step:
        raise DamagedError(f"it is of step {manifest.step}")
    del entries[manifests.FILE_NAME]
    if different := sorted(entries.keys() ^ manifest.files.keys()):
        name = different[0]
        raise DamagedError(f"{name!r:.80} is {'missing' if name in manifest.files else 'foreign'}")
    for name, content in manifest.files.items():
        if entries[name].st_size != content.size:
            raise DamagedError(f"{name} has {entries[name].st_size} bytes, not {content.size}")
    for name in share(manifest, rank, size):
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files[name].sha256:
                raise DamagedError(f"{name} does not match its SHA-256")
    return manifest


def share(manifest: Manifest, rank: int, size: int) -> list[str]:
    """Deal files to ranks by their size; every rank deals alike."""
    dealt = [0] * size
    shares: list[list[str]] = [[] for _ in range(size)]
    for name, content in sorted(manifest.files.items(), key=lambda f: (-f[1].size, f[0])):
        least = dealt.index(min(dealt))
        dealt[least] += content.size
        shares[least].append(name)
    return shares[rank]


def _manifest(path: Path, entries: Mapping[str, os.stat_result]) -> Manifest:
    if manifests.FILE_NAME not in entries:
        raise DamagedError(f"{manifests.FILE_NAME} is missing")
    if entries[manifests.FILE_NAME].st_size > manifests.MAX_BYTES:
        raise DamagedError(f"{manifests.FILE_NAME} is too large")
    return manifests.parse((path / manifests.FILE_NAME).read_bytes())


def _entries(path: Path) -> dict[str, os.stat_result]:
    """List a checkpoint's files.

    Raises:
        DamagedError: there are links, folders or devices, or the folder itself is one.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise DamagedError("it is not a folder")
    entries = {entry.name: entry.lstat() for entry in path.iterdir()}
    for name, status in entries.items():
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{name!r:.80} is not a plain file")
    return entries
