"""Bring to a copy on this machine what a store has newer: a run, what lists runs, or data.

A run that this machine went on with, and could not send, is `ahead`: its copy stays as it is.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import final

from trainer.checkpoint.manifest import DamagedError, OtherFormatError, verify_folder
from trainer.cli.exit_messages import print_notes
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.run_folder import SWEEP_FILES, RunFolder, is_locked, is_sweep, step_of
from trainer.core.urls import copies_folder, url_of
from trainer.features.storage.store import Info, Store, StoreError, time_of
from trainer.launch.membership import membership

SENT = ".sent"  # in the copy of a run or sweep whose own files its store all has
_CLOCK_S = 1e-3  # a file system may round a time to this
_LISTING = (".json", ".yaml")  # ends of the names of records that list runs
_AT_ONCE = 16  # objects that are read


def bring_copy(path: Path, is_whole: bool) -> bool:
    """See `trainer/cli/remote.py`."""
    url = url_of(path) or ""
    store = Store(url)
    durable.make_own_folder(copies_folder())
    # One process at a time: ranks of a launcher ask for the same.
    file = copies_folder() / RunFolder.LOCK
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_notes([f"{url}: waits for another process, which brings {file.read_text()}"])
            fcntl.flock(lock, fcntl.LOCK_EX)
        file.write_text(url)
        try:
            _Copy(path, store.objects(), is_whole=is_whole).bring(store)
        except StoreError as error:
            if error.is_refusal:
                text = f"{error}; check the bucket's name and the credentials"
                raise ConfigError(f"{url}: {text}") from error
            if is_whole:
                _refuse_stub(path, error)
            text = f"{error}; its copy on this machine is used, if there is one"
            print_notes([f"warning: {url}: {text}"])
            return False
    return True


def _refuse_stub(run: Path, error: StoreError) -> None:
    """Refuse a run whose newest checkpoint is in the store alone, and forget older ones."""
    for step in reversed(RunFolder(run).steps()):
        if not _is_stub(RunFolder(run).checkpoint(step)):
            break
        text = f"step {step} is in the store alone, and the copy would go on from before it"
        raise NoCheckpointError(f"{url_of(run)}: {error}; {text}")
    _drop_stubs(run)


def _drop_stubs(path: Path, but: Iterable[Path] = ()) -> None:
    """Remove manifests without tensors, which would be taken for damaged checkpoints."""
    for manifest in path.glob(f"**/{RunFolder.CHECKPOINTS}/*/{RunFolder.MANIFEST}"):
        if manifest.parent not in but and _is_stub(manifest.parent):
            durable.discard(manifest.parent)


def _is_stub(checkpoint: Path) -> bool:
    return [file.name for file in checkpoint.iterdir()] == [RunFolder.MANIFEST]


@final
class _Copy:
    """The copy of a URL, and what its store has."""

    def __init__(self, path: Path, objects: Mapping[str, Info], *, is_whole: bool) -> None:
        self._path, self._is_whole = path, is_whole
        self._records, self._checkpoints = dict[Path, Info](), dict[Path, dict[str, Info]]()
        for name, info in objects.items():
            file = path / name
            folder = file.parent
            if step_of(folder) is None or folder.parent.name != RunFolder.CHECKPOINTS:
                if is_whole or file.suffix in _LISTING or file.name in RunFolder.JOURNALS:
                    self._records[file] = info
            # Half of one has no manifest.
            elif str(Path(name).with_name(RunFolder.MANIFEST)) in objects:
                self._checkpoints.setdefault(folder, {})[file.name] = info

    def bring(self, store: Store) -> None:
        """Bring what is newer, but nothing of a run that is ahead.

        First come the manifests, so that a copy that breaks off knows which steps it lacks.
        """
        runs, ahead = self._runs()
        checkpoints = dict[Path, dict[str, Info]]()
        for folder, files in self._checkpoints.items():
            if ahead.isdisjoint(folder.parents):
                checkpoints[folder] = files
                if not folder.exists():
                    manifest = {RunFolder.MANIFEST: files[RunFolder.MANIFEST]}
                    _bring_checkpoint(store, folder, manifest)
        records = dict[Path, Info]()
        for file, info in self._records.items():
            if ahead.isdisjoint(file.parents) and _differs(file, info):
                records[file] = info
        _get_all(store, records)
        if self._is_whole:
            for folder, files in checkpoints.items():
                if not _is_intact(folder):
                    _bring_checkpoint(store, folder, files)
            self._remove_others()
        for run in runs:
            (run / SENT).touch()
        _drop_stubs(self._path, self._checkpoints)

    def _runs(self) -> tuple[set[Path], set[Path]]:
        """Find the folders of runs and sweeps, and beside them those that are ahead."""
        runs, ahead = set[Path](), set[Path]()
        for file in self._records:
            folder = file.parent
            if file.name in {RunFolder.CONFIG, *SWEEP_FILES} and folder.name != RunFolder.HYDRA:
                (ahead if self._is_ahead(RunFolder(folder)) else runs).add(folder)
        return runs, ahead

    def _remove_others(self) -> None:
        """Remove data that the store has no more; nothing of runs and sweeps among them."""
        for file in {self._path, *self._path.rglob("*")} - self._records.keys():
            # A cache may be below a folder that looks like one of a run.
            above = [each for each in file.parents if each.is_relative_to(copies_folder())]
            in_run = any(RunFolder(each).is_run or is_sweep(each) for each in above)
            if file.is_file() and not in_run:
                file.unlink()

    def _is_ahead(self, run: RunFolder) -> bool:
        """Whether a run is in use here, or was and was not sent, with no older a checkpoint."""
        theirs = [step_of(each) or 0 for each in self._checkpoints if run.path == each.parents[1]]
        is_older = max(run.steps(), default=0) < max(theirs, default=0)
        is_unsent = (run.path / RunFolder.LOCK).exists() and not (run.path / SENT).exists()
        return is_locked(run.path) or (is_unsent and not is_older)


def _bring_checkpoint(store: Store, folder: Path, files: Mapping[str, Info]) -> None:
    """Bring files of a checkpoint in one step."""
    unfinished = durable.begin_folder(folder)
    try:
        # Who prunes it removes its manifest first.
        if _get_all(store, {unfinished / name: info for name, info in files.items()}):
            if folder.exists():
                durable.remove(folder)
            durable.publish_folder(unfinished, folder)
    finally:
        durable.discard(unfinished)


def _get_all(store: Store, wanted: Mapping[Path, Info]) -> bool:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return all([*pool.map(store.get, wanted.values(), wanted)])


def _is_intact(checkpoint: Path) -> bool:
    """Whether a checkpoint is here as its manifest has it; the first rank of a machine reads it."""
    place = membership()
    if place is not None and place.local_rank > 0:
        return len([*checkpoint.glob("*")]) > 1
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
