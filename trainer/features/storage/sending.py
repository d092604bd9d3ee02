"""Send a run's folder to its store behind the training, the manifests of checkpoints last.

In the store a checkpoint without a manifest is none. Whatever is removed there loses it first.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from trainer.cli.exit_messages import print_notes
from trainer.core import durable
from trainer.core.errors import ConfigError, Preempted, SaveError
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder, is_locked, step_of
from trainer.core.urls import url_of
from trainer.features.storage.copies import SENT
from trainer.features.storage.store import Store, StoreError

SEND_POLL_S = 1.0

_log = logging.getLogger(__name__)


@contextmanager
def sending(folder: Path) -> Iterator[None]:
    """See `trainer/cli/remote.py`; code 8 where a run did not fail, and the store lacks of it."""
    if is_locked(folder):
        # The process that uses it sends it.
        yield
        return
    url = url_of(folder) or ""
    if url.startswith("memory://"):
        print_notes([f"warning: {url}: is gone when this process ends; its copy is {folder}"])
    sender, is_over = Sender(folder, Store(url)), threading.Event()
    sender.begin()
    thread = threading.Thread(target=sender.follow, args=(is_over,), name="storage", daemon=True)
    thread.start()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        is_over.set()
        thread.join()
        if sender.send(is_last=True):
            text = f"{shown_path(folder)}: lacks the end of this run ({sender.fault}), which is in "
            text += f"{folder}; train resume={shown_path(folder)} on this machine sends it"
            if failure is None:
                raise SaveError(text)
            if isinstance(failure, Preempted):
                # Put back into a queue, it would go on elsewhere from an older step.
                failure.exit_code = SaveError.exit_code
            print_notes([text])


@final
class Sender:
    """Sends what is new in a run's folder, or a sweep's; `fault` says why the last try failed."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store, self.fault = folder, store, ""
        self._is_new = not folder.exists()
        # What the store has: records by their state, and checkpoints
        self._records, self._checkpoints = dict[str, tuple[int, int]](), set[str]()

    def begin(self) -> None:
        """Find what the store has; of a new run one that does not take it is a `ConfigError`.

        Of another one it may be away, and come back.
        """
        records, here = self._find()
        unsent = {run for run in self._used() if not (run / SENT).exists()}

        def is_sent(name: str) -> bool:
            return unsent.isdisjoint((self._folder / name).parents)

        self._records = {name: records[name] for name in filter(is_sent, records)}
        self._checkpoints = {*filter(is_sent, here)}
        # Whoever is killed from now on may leave what is not sent.
        for mark in self._folder.glob(f"**/{SENT}"):
            mark.unlink(missing_ok=True)
        try:
            if self._is_new:
                self._store.try_writing()
                return
            there = self._store.objects()
            self._records = {name: self._records[name] for name in self._records.keys() & there}
            for name in there:
                checkpoint, _, file = name.rpartition("/")
                # What is not here was pruned, and this machine could not say so.
                is_gone = file == RunFolder.MANIFEST and not (self._folder / checkpoint).exists()
                if is_gone and not is_sent(name):
                    self._checkpoints.add(checkpoint)
        except StoreError as error:
            if self._is_new:
                text = f"{error}; nothing can be written there, so no run begins"
                raise ConfigError(f"{url_of(self._folder)}: {text}") from error

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
                for run in self._used():
                    if not is_locked(run):
                        (run / SENT).touch()
        except (StoreError, OSError) as error:
            self.fault = str(error)
            text = f"not written ({error}); the run goes on, and each checkpoint tries again"
        if bool(before) != bool(self.fault):
            text = f"{shown_path(self._folder)}: {text or 'written again, nothing is missing'}"
            _log.warning("%s", text)
            print_notes([f"warning: {text}"])
        return self.fault

    def _send(self) -> None:
        """Send all that is new, the newest first, and remove what was pruned."""
        if not self._folder.exists():
            # What fails before its first step takes its folder back.
            if self._is_new and self._records and not self._checkpoints:
                self._store.remove("")
            return
        # A process that listed runs may have made one before this run was in use.
        for mark in self._folder.glob(f"**/{SENT}"):
            mark.unlink(missing_ok=True)
        for name in sorted(self._find()[1] - self._checkpoints, reverse=True):
            # It may be pruned before it is linked.
            with suppress(FileNotFoundError):
                self._send_checkpoint(name)
        self._send_records()
        for name in sorted(self._checkpoints - self._find()[1]):
            beside = {each for each in self._checkpoints if Path(each).parent == Path(name).parent}
            # Of a store that lags behind the newest stays until there is a newer one.
            if name != max(beside):
                self._store.remove(name)
                self._checkpoints.remove(name)

    def _send_checkpoint(self, name: str) -> None:
        """Send its files, the records, and then its manifest."""
        with _linked(self._folder / name) as folder:
            manifest = (folder / RunFolder.MANIFEST).read_bytes()
            there = self._store.read(f"{name}/{RunFolder.MANIFEST}")
            if there not in {None, manifest}:
                # Of another run of the same step: nobody may find it beside files of this one.
                self._store.remove(name)
            for file in sorted(folder.iterdir()):
                if there != manifest and file.name != RunFolder.MANIFEST:
                    self._store.put(f"{name}/{file.name}", file)
            self._send_records()
            self._store.put(f"{name}/{RunFolder.MANIFEST}", manifest)
            self._checkpoints.add(name)

    def _send_records(self) -> None:
        for name, state in self._find()[0].items():
            # One may be removed meanwhile, as what a run failed by before, and one may grow.
            if self._records.get(name) != state and (file := self._folder / name).exists():
                self._store.put(name, file.read_bytes())
                self._records[name] = state

    def _used(self) -> list[Path]:
        """List the folder, and below it those of runs that were used on this machine."""
        return [self._folder, *(lock.parent for lock in self._folder.glob(f"**/{RunFolder.LOCK}"))]

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


@contextmanager
def _linked(checkpoint: Path) -> Iterator[Path]:
    """Link a checkpoint's files, or copy them, for they may be pruned while they are sent."""
    links = checkpoint.parents[1] / f"{durable.UNFINISHED}sending"
    durable.discard(links)
    links.mkdir()
    try:
        for file in checkpoint.iterdir():
            try:
                os.link(file, links / file.name)
            except OSError:
                shutil.copyfile(file, links / file.name)
        yield links
    finally:
        durable.discard(links)
