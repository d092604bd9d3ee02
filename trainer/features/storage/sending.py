"""Send a run to its store behind the training, from a thread of the process that started it.

The files of a checkpoint go first, then the small records, then its manifest: who finds a manifest
in the store finds the whole checkpoint. One that was pruned loses its manifest first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from trainer.cli.exit_messages import print_notes
from trainer.core.errors import SaveError
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder, step_of
from trainer.core.urls import url_of
from trainer.features.storage.copies import SENT
from trainer.features.storage.store import Store, StoreError

SEND_POLL_S = 1.0

_log = logging.getLogger(__name__)


@contextmanager
def sending(folder: Path) -> Iterator[None]:
    """See `trainer/cli/remote.py`; `SaveError` where a run ended well and the store lacks of it."""
    sender, is_over = Sender(folder, Store(url_of(folder) or "")), threading.Event()
    thread = threading.Thread(target=sender.follow, args=(is_over,), name="storage", daemon=True)
    thread.start()
    ended_well = False
    try:
        yield
        ended_well = True
    finally:
        is_over.set()
        thread.join()
        if sender.send(is_last=True):
            url = shown_path(folder)
            text = f"{url}: lacks the end of this run ({sender.fault}), which is in {folder}"
            text += f"; train resume={url} on this machine sends it"
            if ended_well:
                raise SaveError(text)
            print_notes([text])


@final
class Sender:
    """Sends what is new in a run's folder, or a sweep's; `fault` says why the last try failed."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store, self.fault = folder, store, ""
        self._is_new = not folder.exists()
        # What the store has: records by their state, and checkpoints
        self._records, self._checkpoints = dict[str, tuple[int, int]](), set[str]()
        if (folder / SENT).exists():
            self._records, self._checkpoints = self._find()

    def follow(self, is_over: threading.Event) -> None:
        """Send once the run has a plan, and where a checkpoint is new or gone, until it is over."""
        before = set[str]()
        while not is_over.wait(SEND_POLL_S):
            records, checkpoints = self._find()
            now = checkpoints | {name for name in records if name.endswith(RunFolder.PLAN)}
            if now != before:
                before = now
                self.send()

    def send(self, *, is_last: bool = False) -> str:
        """Try to send all that is new; gives why that failed, if it did, and prints it once."""
        before, self.fault, text = self.fault, "", ""
        try:
            self._send()
            if is_last and self._folder.exists():
                (self._folder / SENT).touch()
        except (StoreError, OSError) as error:
            self.fault = str(error)
            text = f"not written ({error}); the run goes on, and each checkpoint tries again"
        if bool(before) != bool(self.fault):
            text = f"{shown_path(self._folder)}: {text or 'written again, nothing is missing'}"
            _log.warning("%s", text)
            print_notes([f"warning: {text}"])
        return self.fault

    def _send(self) -> None:
        """Send all that is new, and remove what was pruned."""
        if not self._folder.exists():
            # What fails before its first step takes its folder back.
            if self._is_new and self._records and not self._checkpoints:
                self._store.remove("")
            return
        records, checkpoints = self._find()
        if checkpoints - self._checkpoints or records != self._records:
            for mark in self._folder.glob(f"**/{SENT}"):
                mark.unlink()
        manifests = dict[str, bytes]()
        for name in sorted(checkpoints - self._checkpoints):
            try:
                manifests[name] = self._send_files(name)
            except (StoreError, FileNotFoundError):
                if (self._folder / name).exists():
                    raise
                # It was pruned meanwhile.
                self._store.remove(name)
        self._send_records(records)
        for name, manifest in manifests.items():
            self._store.put(f"{name}/{RunFolder.MANIFEST}", manifest)
            self._checkpoints.add(name)
        for name in self._checkpoints - self._find()[1]:
            self._store.remove(name)
            self._checkpoints.remove(name)

    def _send_files(self, checkpoint: str) -> bytes:
        """Send all but the manifest, unless all of it is there; gives the manifest."""
        folder = self._folder / checkpoint
        manifest = (folder / RunFolder.MANIFEST).read_bytes()
        there = self._store.read(f"{checkpoint}/{RunFolder.MANIFEST}")
        if there not in {None, manifest}:
            # Of another run of the same step: nobody may find it beside files of this one.
            self._store.remove(checkpoint)
        for file in sorted(folder.iterdir()):
            if there != manifest and file.name != RunFolder.MANIFEST:
                self._store.put(f"{checkpoint}/{file.name}", file)
        return manifest

    def _send_records(self, records: Mapping[str, tuple[int, int]]) -> None:
        for name, state in records.items():
            # One may be removed meanwhile, as what a run failed by before.
            if self._records.get(name) != state and (file := self._folder / name).exists():
                self._store.put(name, file.read_bytes())
                self._records[name] = state

    def _find(self) -> tuple[dict[str, tuple[int, int]], set[str]]:
        """Find records, each with the time of its last change and its size, and checkpoints."""
        records, checkpoints = dict[str, tuple[int, int]](), set[str]()
        for place, folders, files in os.walk(self._folder):
            # What is unfinished begins with a dot, too.
            folders[:] = [each for each in folders if each[0] != "." or each == RunFolder.HYDRA]
            folder = Path(place)
            if folder.parent.name == RunFolder.CHECKPOINTS:
                # Of one that was only listed the manifest is all that is here.
                if step_of(folder) is not None and RunFolder.MANIFEST in files and files[1:]:
                    checkpoints.add(str(folder.relative_to(self._folder)))
                continue
            for name in files:
                # It may be replaced meanwhile.
                with suppress(FileNotFoundError):
                    if name[0] != "." and not (folder / name).is_symlink():
                        status = (folder / name).stat()
                        path = str((folder / name).relative_to(self._folder))
                        records[path] = status.st_mtime_ns, status.st_size
        return records, checkpoints
