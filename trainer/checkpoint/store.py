"""The checkpoints of one run: saved all or not at all, verified before anything of them is used.

Save: everything goes into a folder `.tmp-step-<n>-<uuid>`, each file durable, the manifest last;
then the folder durable, renamed to `step-<n>`, its parent durable; only then are older ones
pruned, each renamed to `.trash-...` before it is deleted. So at every instant a name `step-<n>`
shows a whole checkpoint or does not exist, and nothing is ever overwritten.

Load: newest first; the exact set of files, their sizes and SHA-256, and the exact set of tensors
are checked. A damaged checkpoint is set aside as `damaged-step-<n>`, and the next older one is
taken.

One process may write, the one that holds the run (`trainer.checkpoint.lock`); any may read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from trainer import durable
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import shards
from trainer.checkpoint.manifest import DamagedError, Manifest, NewerFormatError
from trainer.checkpoint.shards import Part
from trainer.errors import NoCheckpointError, SaveError

_logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step-(\d{8,})")
_DAMAGED = "damaged-"
_SHOWN = 3

_Signature = frozenset[tuple[str, int, int, int]]


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A verified checkpoint.

    Attributes:
        step: optimizer steps taken.
        tensors: by name, on the CPU; aliases of tied weights are the same object.
        aliases: further names of tensors, each with the name that is stored.
        meta: everything that is not a tensor, as JSON.
        path: its folder.
        messages: one line for each newer checkpoint that could not be used.
    """

    step: int
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    meta: Mapping[str, Any]
    path: Path
    messages: tuple[str, ...] = ()


@final
class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: `RUN/checkpoints`; made when something is saved.
        keep: how many intact ones are kept, at least 1; `None` keeps all.
        shard_bytes: largest safetensors file, where it holds several tensors.
    """

    def __init__(
        self, folder: Path, keep: int | None = None, *, shard_bytes: int = shards.SHARD_BYTES
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.folder = folder
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._intact: dict[int, _Signature] = {}

    def path(self, step: int) -> Path:
        """Name the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, intact or not, ascending."""
        if not self.folder.is_dir():
            return []
        found = {path.name: _STEP_NAME.fullmatch(path.name) for path in self.folder.iterdir()}
        steps = [int(match[1]) for match in found.values() if match]
        return sorted({step for step in steps if self.path(step).name in found})

    def clean(self) -> None:
        """Delete what earlier crashes left unfinished. Only for who holds the run."""
        durable.clean(self.folder)

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint; when this returns it survives a power cut.

        A checkpoint of the same step and state that is already there stands; a damaged one is set
        aside.

        Args:
            step: optimizer steps taken.
            tensors: by name, as `trainer.checkpoint.shards.write` takes them.
            meta: everything else, as JSON.

        Returns:
            Its folder.

        Raises:
            SaveError: it could not be written, or the step's name is taken by another state. The
                older checkpoints are as they were, and nothing of this one is left.
            TypeError: something is no tensor that can be stored, or no JSON.
            ValueError: `meta` holds NaN or infinity.
        """
        final_path = self.path(step)
        unfinished = self.folder / f"{durable.UNFINISHED}{final_path.name}-{uuid.uuid4().hex}"
        try:
            durable.make_folders(self.folder)
            self.clean()
            durable.make_folder(unfinished)
            part = shards.write(unfinished, tensors, self._shard_bytes)
            self._commit(step, unfinished, part, meta)
        except OSError as error:
            durable.discard(unfinished)
            failure = durable.save_error(error, final_path, shards.num_bytes(tensors))
            raise failure from error
        except (SaveError, TypeError, ValueError):
            durable.discard(unfinished)
            raise
        self._prune()
        return final_path

    def load(self, step: int | None = None, *, set_aside: bool = True) -> Loaded:
        """Read and verify the newest intact checkpoint, or the one of a step.

        Args:
            step: which one; `None` takes the newest that is intact.
            set_aside: whether damaged ones are renamed to `damaged-...`; not for a mere reader.

        Raises:
            NoCheckpointError: there is none; the text says what is wrong with those there are.
        """
        steps = self.steps()
        messages: list[str] = []
        was_pruned = False
        for candidate in reversed(steps) if step is None else [step] * (step in steps):
            try:
                return self._read(candidate, tuple(messages))
            except DamagedError as damage:
                messages.append(self._report(candidate, damage, set_aside=set_aside))
            except NewerFormatError as error:
                raise NoCheckpointError(
                    f"{self.path(candidate)}: written by a newer version ({error}): upgrade"
                ) from error
            except OSError as error:
                was_pruned |= not os.path.lexists(self.path(candidate))
                messages.append(f"{self.path(candidate)}: unreadable: {error.strerror}")
        if was_pruned:  # by the process that trains, which has saved newer ones since
            return self.load(step, set_aside=set_aside)
        raise self._none(step, steps, messages)

    def _commit(self, step: int, unfinished: Path, part: Part, meta: Mapping[str, Any]) -> None:
        final_path = self.path(step)
        manifest = Manifest(
            step=step, files=part.files, tensors=part.tensors, aliases=part.aliases, meta=meta
        )
        durable.write_file(unfinished / manifests.FILE_NAME, [manifests.dump(manifest)])
        if os.path.lexists(final_path) and self._stands(step, manifest):
            durable.discard(unfinished)
            return
        durable.publish(unfinished, final_path)
        self._intact[step] = _signature(final_path)

    def _stands(self, step: int, manifest: Manifest) -> bool:
        """Whether the step has an intact checkpoint of the same state; damaged ones make room.

        Raises:
            SaveError: it has one of another state.
        """
        try:
            same = _trained(verify(self.path(step), step)) == _trained(manifest)
        except DamagedError as damage:
            _logger.warning("%s", self._report(step, damage, set_aside=True))
            return False
        except NewerFormatError:
            same = False
        if not same:
            raise SaveError(
                f"{self.path(step)}: holds another state of this step, and is never overwritten: "
                "move it away, or use another run folder"
            )
        return True

    def _read(self, step: int, messages: tuple[str, ...]) -> Loaded:
        path = self.path(step)
        manifest = verify(path, step)
        self._intact[step] = _signature(path)
        tensors = shards.read(path, manifest.files, manifest.tensors)
        tensors |= {alias: tensors[name] for alias, name in manifest.aliases.items()}
        return Loaded(
            step=step,
            tensors=tensors,
            aliases=manifest.aliases,
            meta=manifest.meta,
            path=path,
            messages=messages,
        )

    def _prune(self) -> None:
        """Delete what is older than the `keep` newest intact ones; damaged ones do not count."""
        if self._keep is None:
            return
        num_intact = 0
        for step in reversed(self.steps()):
            try:
                if num_intact >= self._keep:
                    durable.remove(self.path(step))
                    self._intact.pop(step, None)
                else:
                    num_intact += self._is_intact(step)
            except OSError as error:
                _logger.warning("%s: could not be pruned: %s", self.path(step), error.strerror)

    def _is_intact(self, step: int) -> bool:
        """Verify, unless nothing changed since this process wrote or verified it."""
        path = self.path(step)
        if self._intact.get(step) == _signature(path):
            return True
        try:
            verify(path, step)
        except (DamagedError, NewerFormatError):
            return False
        self._intact[step] = _signature(path)
        return True

    def _report(self, step: int, damage: DamagedError, *, set_aside: bool) -> str:
        path = self.path(step)
        message = f"{path}: damaged: {damage}"
        if not set_aside:
            return message
        aside = self._free_name(path)
        try:
            durable.rename(path, aside)
        except OSError as error:
            return f"{message}; could not be set aside: {error.strerror}"
        return f"{message}; set aside as {aside.name}"

    def _free_name(self, path: Path) -> Path:
        aside = path.with_name(f"{_DAMAGED}{path.name}")
        if os.path.lexists(aside):
            aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex}")
        return aside

    def _none(self, step: int | None, steps: list[int], messages: list[str]) -> NoCheckpointError:
        if messages:
            more = f" and {len(messages) - _SHOWN} more" if len(messages) > _SHOWN else ""
            return NoCheckpointError(
                f"no intact checkpoint: {'; '.join(messages[:_SHOWN])}{more}: "
                "start anew, or put a copy back"
            )
        if step is not None and steps:
            there = ", ".join(map(str, steps))
            return NoCheckpointError(f"{self.folder}: no checkpoint of step {step}; has {there}")
        return NoCheckpointError(f"{self.folder}: no checkpoint here")


def verify(path: Path, step: int | None = None) -> Manifest:
    """Check that a checkpoint's folder holds exactly what was written, bit for bit.

    Args:
        path: its folder.
        step: the step it must be of; `None` accepts any.

    Raises:
        DamagedError: it does not.
        NewerFormatError: it is whole, and of another format version.
        OSError: it cannot be read.
    """
    entries = _entries(path)
    if manifests.FILE_NAME not in entries:
        raise DamagedError(f"{manifests.FILE_NAME} is missing")
    if entries[manifests.FILE_NAME].st_size > manifests.MAX_BYTES:
        raise DamagedError(f"{manifests.FILE_NAME} is too large")
    manifest = manifests.parse((path / manifests.FILE_NAME).read_bytes())
    if step is not None and manifest.step != step:
        raise DamagedError(f"it is of step {manifest.step}")
    del entries[manifests.FILE_NAME]
    if different := sorted(entries.keys() ^ manifest.files.keys()):
        name = different[0]
        raise DamagedError(f"{name!r:.80} is {'missing' if name in manifest.files else 'foreign'}")
    for name, content in manifest.files.items():
        if entries[name].st_size != content.size:
            raise DamagedError(f"{name} has {entries[name].st_size} bytes, not {content.size}")
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != content.sha256:
                raise DamagedError(f"{name} does not match its SHA-256")
    return manifest


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


def _signature(path: Path) -> _Signature:
    return frozenset(
        (entry.name, status.st_size, status.st_mtime_ns, status.st_ino)
        for entry in path.iterdir()
        for status in [entry.lstat()]
    )


def _trained(manifest: Manifest) -> dict[str, object]:
    """Take what the steps determine; random states may have moved on since (an evaluation)."""
    return {name: file for name, file in manifest.files.items() if not name.startswith("state")}
