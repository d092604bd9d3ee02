"""Bring to a copy on this machine what a store has newer: a run, the records of runs, or data.

A run that this machine went on with, and could not send, is `ahead`: its copy stays as it is.
"""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from trainer.checkpoint.manifest import DamagedError, OtherFormatError, verify_folder
from trainer.cli.exit_messages import print_notes
from trainer.cli.remote import What
from trainer.core import durable
from trainer.core.run_folder import RunFolder, is_locked, step_of
from trainer.core.urls import copies_folder, url_of
from trainer.features.storage.store import Info, Store, StoreError, time_of

SENT = ".sent"  # in a copy that has nothing which its store lacks
_CLOCK_S = 1e-3  # a file system may round a time to this


def bring_copy(path: Path, what: What) -> bool:
    """See `trainer/cli/remote.py`."""
    url = url_of(path) or ""
    store = Store(url)
    durable.make_own_folder(copies_folder())
    try:
        # One process at a time: ranks of a launcher ask for the same.
        with (copies_folder() / RunFolder.LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _Copy(path, store, store.objects(), what).bring()
    except StoreError as error:
        print_notes([f"warning: {url}: {error}; its copy on this machine is used, if there is one"])
        _drop_stubs(path)
        return False
    return True


def _drop_stubs(path: Path, but: Collection[Path] = ()) -> None:
    """Remove manifests without tensors, which would be taken for damaged checkpoints."""
    for manifest in path.glob(f"**/{RunFolder.CHECKPOINTS}/*/{RunFolder.MANIFEST}"):
        folder = manifest.parent
        if folder not in but and [*folder.iterdir()] == [manifest]:
            durable.discard(folder)


@final
class _Copy:
    """The copy of a URL, and what its store has."""

    def __init__(self, path: Path, store: Store, objects: Mapping[str, Info], what: What) -> None:
        self._path, self._store, self._what = path, store, what
        self._records, self._checkpoints = dict[Path, Info](), dict[Path, dict[str, Info]]()
        for name, info in objects.items():
            file = path / name
            folder = file.parent
            if step_of(folder) is None or folder.parent.name != RunFolder.CHECKPOINTS:
                self._records[file] = info
            # Half of one has no manifest.
            elif str(Path(name).with_name(RunFolder.MANIFEST)) in objects:
                self._checkpoints.setdefault(folder, {})[file.name] = info

    def bring(self) -> None:
        """Bring what is newer, records first, but nothing of a run that is ahead."""
        runs = {file.parent for file in self._records if file.name == RunFolder.CONFIG}
        ahead = {run for run in runs if self._is_ahead(RunFolder(run))}
        for file, info in self._records.items():
            if ahead.isdisjoint(file.parents) and _differs(file, info):
                self._store.get(info, file)
        for folder, files in self._checkpoints.items():
            if ahead.isdisjoint(folder.parents):
                self._bring_checkpoint(folder, files)
        for run in runs - ahead:
            (run / SENT).touch()
        _drop_stubs(self._path, self._checkpoints)
        # Data that the store has no more; nothing of runs among them
        for file in (self._path, *self._path.rglob("*")) if self._what == "data" else ():
            in_run = any(RunFolder(folder).is_run for folder in file.parents)
            if file.is_file() and file not in self._records and not in_run:
                file.unlink()

    def _is_ahead(self, run: RunFolder) -> bool:
        """Whether a run is in use here, or was and was not sent, with no older a checkpoint."""
        theirs = [step_of(each) or 0 for each in self._checkpoints if run.path in each.parents]
        is_older = max(run.steps(), default=0) < max(theirs, default=0)
        is_sent = any((each / SENT).exists() for each in (run.path, run.path.parent))
        was_used = (run.path / RunFolder.LOCK).exists()
        return is_locked(run.path) or (was_used and not is_sent and not is_older)

    def _bring_checkpoint(self, folder: Path, files: Mapping[str, Info]) -> None:
        """Bring a checkpoint in one step, unless it is here and intact."""
        if folder.exists() and (self._what == "records" or _is_intact(folder)):
            return
        unfinished = durable.begin_folder(folder)
        try:
            for name, info in files.items():
                if self._what != "records" or name == RunFolder.MANIFEST:
                    self._store.get(info, unfinished / name)
            if folder.exists():
                durable.remove(folder)
            durable.publish_folder(unfinished, folder)
        finally:
            durable.discard(unfinished)


def _is_intact(checkpoint: Path) -> bool:
    with suppress(DamagedError, OtherFormatError, OSError):
        return verify_folder(checkpoint) is not None
    return False


def _differs(file: Path, info: Info) -> bool:
    """Whether a file is not what its store has, by its size and the time of its last change."""
    changed = time_of(info)
    if not file.is_file() or changed is None:
        return True
    status = file.stat()
    return status.st_size != info["size"] or abs(status.st_mtime - changed) > _CLOCK_S
