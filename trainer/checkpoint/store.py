"""The checkpoints of one run: saved all or not at all, verified before anything of them is used.

Save: everything goes into a folder `.tmp-step-<n>-<uuid>`, each file durable, the manifest last;
then the folder durable, renamed to `step-<n>`, its parent durable; only then are older ones
pruned, each renamed to `.trash-...` before it is deleted. So at every instant a name `step-<n>`
shows a whole checkpoint or does not exist, and nothing is ever overwritten.

Load: newest first; the exact set of files, their sizes and SHA-256, and the exact set of tensors
are checked. A damaged checkpoint is set aside as `damaged-step-<n>`, and the next older one is
taken.

One run may write, the one that holds the folder (`trainer.checkpoint.lock`); any may read. Of a
run on several ranks each rank writes the rows it holds, and the main one all else; each verifies
a share of the files, and reads the rows it needs.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import tensor_files
from trainer.checkpoint.integrity import share, verify
from trainer.checkpoint.manifest import DamagedError, Entry, Manifest, NewerFormatError, Slice
from trainer.checkpoint.rank_pieces import Piece, aliases_of, num_bytes, pieces
from trainer.checkpoint.tensor_reader import Stored, Whole, same_bits, stored_in
from trainer.config.messages import first_of
from trainer.core import durable
from trainer.core.durable import Written
from trainer.core.errors import NoCheckpointError, SaveError
from trainer.core.world import World

_logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step-(\d{8,})")
_DAMAGED = "damaged-"
_DAMAGE, _GONE, _NEWER, _UNREADABLE = "damaged", "gone", "newer", "unreadable"

_ALONE = World()

_Signature = frozenset[tuple[str, int, int, int]]


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A verified checkpoint.

    Attributes:
        step: optimizer steps taken.
        stored: the tensors by name, unread; aliases of tied weights are the same object.
        aliases: further names of tensors, each with the name that is stored.
        meta: everything that is not a tensor, as JSON.
        path: its folder.
        messages: one line for each newer checkpoint that could not be used.
    """

    step: int
    stored: Mapping[str, Stored]
    aliases: Mapping[str, str]
    meta: Mapping[str, Any]
    path: Path
    messages: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name, on the CPU; each is read whole when it is asked for."""
        return Whole(self.stored)


@final
class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: `RUN/checkpoints`; made when something is saved.
        keep: how many intact ones are kept, at least 1; `None` keeps all.
        shard_bytes: largest safetensors file, where it holds several tensors.
    """

    def __init__(
        self, folder: Path, keep: int | None = None, *, shard_bytes: int = tensor_files.SHARD_BYTES
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

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | Piece],
        meta: Mapping[str, Any],
        world: World = _ALONE,
    ) -> Path:
        """Write a checkpoint; when this returns it survives a power cut. Collective.

        A checkpoint of the same step and state that is already there stands; a damaged one is set
        aside.

        Args:
            step: optimizer steps taken.
            tensors: by name, the same names on every rank; of one in shards this rank's are stored.
            meta: everything else, as JSON; the main rank's is stored.
            world: the ranks that save.

        Returns:
            Its folder.

        Raises:
            SaveError: it could not be written, or the step's name is taken by another state. The
                older checkpoints are as they were, and nothing of this one is left.
            TypeError: something is no tensor that can be stored, or no JSON.
            ValueError: `meta` holds NaN or infinity.
        """
        final_path = self.path(step)
        unfinished = self.folder / world.on_main(lambda: self._begin(final_path))
        try:
            own = pieces(tensors, world.rank)
            parts = world.on_all(lambda: self._write(step, unfinished, own, world.rank))
            world.on_main(lambda: self._commit(step, unfinished, _manifest(step, own, parts, meta)))
        except (SaveError, TypeError, ValueError):
            if world.is_main:
                durable.discard(unfinished)
            raise
        return final_path

    def load(
        self, step: int | None = None, *, set_aside: bool = True, world: World = _ALONE
    ) -> Loaded:
        """Verify the newest intact checkpoint, or the one of a step, and open it. Collective.

        Args:
            step: which one; `None` takes the newest that is intact.
            set_aside: whether damaged ones are renamed to `damaged-...`; not for a mere reader.
            world: the ranks that load; all get the same.

        Raises:
            NoCheckpointError: there is none; the text says what is wrong with those there are.
        """
        steps = world.on_main(self.steps)
        messages: list[str] = []
        was_pruned = False
        for candidate in reversed(steps) if step is None else [step] * (step in steps):
            loaded, fault = self._read(candidate, tuple(messages), world)
            faults = [each for each in world.collect(fault) if each is not None]
            if loaded is not None and not faults:
                self._intact[candidate] = _signature(loaded.path)
                return loaded
            kind, text = min(faults)  # in order of the alphabet: damage counts most
            if kind == _NEWER:
                raise NoCheckpointError(
                    f"{self.path(candidate)}: written by a newer version ({text}): upgrade"
                )
            was_pruned |= kind == _GONE
            aside = set_aside and kind == _DAMAGE
            tell = partial(self._report, candidate, kind, text, set_aside=aside)
            messages.append(world.on_main(tell))
        if was_pruned:  # by the process that trains, which has saved newer ones since
            return self.load(step, set_aside=set_aside, world=world)
        raise self._none(step, steps, messages)

    def _begin(self, final_path: Path) -> str:
        """Make the folder that is written into.

        Raises:
            SaveError: the disk refused.
        """
        name = f"{durable.UNFINISHED}{final_path.name}-{uuid.uuid4().hex}"
        with _refused(final_path):
            durable.make_folders(self.folder)
            self.clean()
            durable.make_folder(self.folder / name)
        return name

    def _write(
        self, step: int, unfinished: Path, own: Mapping[str, Piece], rank: int
    ) -> dict[str, Any]:
        """Write what one rank stores, and tell what that is, in JSON.

        Raises:
            SaveError: the disk refused.
        """
        with _refused(self.path(step), num_bytes(own)):
            part = tensor_files.write(unfinished, own, rank=rank, shard_bytes=self._shard_bytes)
        return asdict(part)

    def _commit(self, step: int, unfinished: Path, manifest: Manifest) -> None:
        """Give a checkpoint that all ranks have written its name, and prune older ones.

        Raises:
            SaveError: the disk refused, or the name is taken.
        """
        final_path = self.path(step)
        with _refused(final_path):
            durable.write_file(unfinished / manifests.FILE_NAME, [manifests.dump(manifest)])
            if os.path.lexists(final_path) and self._stands(step, unfinished, manifest):
                durable.discard(unfinished)
            else:
                durable.publish(unfinished, final_path)
                self._intact[step] = _signature(final_path)
        self._prune()

    def _stands(self, step: int, unfinished: Path, manifest: Manifest) -> bool:
        """Whether the step has an intact checkpoint of the same state; damaged ones make room.

        Raises:
            SaveError: it has one of another state.
        """
        try:
            same = _same_training(self.path(step), step, unfinished, manifest)
        except DamagedError as damage:
            report = self._report(step, _DAMAGE, str(damage), set_aside=True)
            _logger.warning("%s", report)
            return False
        except NewerFormatError:
            same = False
        if not same:
            raise SaveError(
                f"{self.path(step)}: holds another state of this step, and is never overwritten: "
                "move it away, or use another run folder"
            )
        return True

    def _read(
        self, step: int, messages: tuple[str, ...], world: World
    ) -> tuple[Loaded | None, tuple[str, str] | None]:
        """Verify this rank's share of a checkpoint and open it, or tell what is wrong with it."""
        path = self.path(step)
        try:
            manifest = verify(path, step, rank=world.rank, size=world.size)
            stored, files = stored_in(path, manifest.tensors, manifest.aliases)
            for name in share(manifest, world.rank, world.size):
                files.open(name)
        except DamagedError as damage:
            return None, (_DAMAGE, str(damage))
        except NewerFormatError as error:
            return None, (_NEWER, str(error))
        except OSError as error:
            kind = _UNREADABLE if os.path.lexists(path) else _GONE
            return None, (kind, str(error.strerror))
        loaded = Loaded(
            step=step,
            stored=stored,
            aliases=manifest.aliases,
            meta=manifest.meta,
            path=path,
            messages=messages,
        )
        return loaded, None

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

    def _report(self, step: int, kind: str, text: str, *, set_aside: bool) -> str:
        path = self.path(step)
        message = f"{path}: {_UNREADABLE if kind == _GONE else kind}: {text}"
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
            return NoCheckpointError(
                f"no intact checkpoint: {first_of(messages, '; ')}: start anew, or put a copy back"
            )
        if step is not None and steps:
            there = ", ".join(map(str, steps))
            return NoCheckpointError(f"{self.folder}: no checkpoint of step {step}; has {there}")
        return NoCheckpointError(f"{self.folder}: no checkpoint here")


def _manifest(
    step: int, own: Mapping[str, Piece], parts: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]
) -> Manifest:
    """Put together what all ranks wrote."""
    aliases = aliases_of(own)
    found: dict[str, list[Slice]] = {name: [] for name in own if name not in aliases}
    for part in parts:
        for name, told in part["slices"].items():
            found[name].append(Slice(**told))
    return Manifest(
        step=step,
        files={name: Written(**told) for part in parts for name, told in part["files"].items()},
        tensors={
            name: Entry(
                tuple(own[name].shape),
                tensor_files.DTYPES[own[name].dtype],
                tuple(sorted(slices, key=lambda each: each.start)),
            )
            for name, slices in found.items()
        },
        aliases=aliases,
        meta=meta,
    )


@contextmanager
def _refused(path: Path, needed: int | None = None) -> Iterator[None]:
    """Say in one line why a checkpoint cannot be written.

    Yields:
        Nothing.

    Raises:
        SaveError: the disk refused, or the ranks wrote what does not fit together.
    """
    try:
        yield
    except DamagedError as error:
        raise SaveError(f"{path}: could not be written: {error}") from error
    except OSError as error:
        failure = durable.save_error(error, path, needed)
        raise failure from error


def _signature(path: Path) -> _Signature:
    return frozenset(
        (entry.name, status.st_size, status.st_mtime_ns, status.st_ino)
        for entry in path.iterdir()
        for status in [entry.lstat()]
    )


def _same_training(path: Path, step: int, unfinished: Path, manifest: Manifest) -> bool:
    """Whether two checkpoints hold what the steps determine alike, on however many ranks written.

    Random states may have moved on since (an evaluation).
    """
    other = verify(path, step)
    names, theirs = (
        {name for name in each.tensors if name.startswith(("model.", "optimizer."))}
        for each in (manifest, other)
    )
    return names == theirs and same_bits(
        stored_in(unfinished, manifest.tensors, {})[0],
        stored_in(path, other.tensors, {})[0],
        names,
    )
