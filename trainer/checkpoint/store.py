"""Save the checkpoints of a run all or not at all, and verify one before anything of it is used.

Save: everything goes into a folder `.tmp-step-<n>-<uuid>`, each file durable, the manifest last;
then the folder durable, renamed to `step-<n>`, its parent durable; only then are older ones
pruned, each renamed to `.trash-...` before it is deleted. So at every instant a name `step-<n>`
shows a whole checkpoint or does not exist, and nothing is ever overwritten.

Load: newest first; the exact set of files, their sizes and SHA-256 are checked. A damaged
checkpoint is set aside as `damaged-step-<n>`, and the next older one is taken.

One run may write, the one that has the folder locked (`trainer.core.run_folder`); any may read. Of
a run on several ranks each rank writes the rows it holds, and the main one all else; each verifies
a share of the files, and reads the rows it needs.
"""

from __future__ import annotations

import copy
import logging
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from trainer.checkpoint import tensor_files
from trainer.checkpoint.manifest import (
    DamagedError,
    Manifest,
    OtherFormatError,
    dump,
    verify_folder,
)
from trainer.config.messages import first_of
from trainer.core import durable
from trainer.core.errors import NoCheckpointError, SaveError
from trainer.core.run_folder import RunFolder, checkpoint_name, step_of
from trainer.core.tensors import in_main_memory
from trainer.core.world import World

MODEL = "model"
"""Name of the part of a checkpoint that holds weights and buffers."""

OPTIMIZER = "optimizer"
"""Name of the part that holds the optimizer's state."""

_logger = logging.getLogger(__name__)

_KINDS = {DamagedError: "damaged", OtherFormatError: "other"}

_ONE_RANK = World()


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A verified checkpoint."""

    step: int  # optimizer steps taken
    tensors: Mapping[str, tensor_files.StoredTensor]  # by name, unread
    parts: Mapping[str, Any]  # by name, with what is no tensor, as in the manifest
    path: Path  # its folder
    messages: tuple[str, ...] = ()  # one line for each newer checkpoint that could not be used
    is_average: bool = False  # whether its weights are the average over steps

    def __str__(self) -> str:
        return f"{self.short}, {self.path}"

    @property
    def short(self) -> str:
        """Say which weights it gives."""
        if self.is_average:
            return f"step {self.step}, average of the weights"
        return f"step {self.step}"


def open_checkpoint(path: Path, step: int | None = None, world: World = _ONE_RANK) -> Loaded:
    """Verify this rank's share of a checkpoint, of `step` or any, and open it."""
    manifest = verify_folder(path, step, rank=world.rank, num_ranks=world.size)
    return Loaded(
        step=manifest.step,
        tensors=tensor_files.open_tensors(path / name for name in sorted(manifest.files)),
        parts=manifest.parts,
        path=path,
    )


@final
class CheckpointStore:
    """The checkpoints in `RUN/checkpoints`; `keep` intact ones stay, or all for None."""

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        self._keep = keep
        self._intact: set[int] = set()  # steps that this process wrote or verified

    @classmethod
    def of(cls, run: Path, keep: int | None = None) -> CheckpointStore:
        """Give the checkpoints of a run."""
        return cls(run / RunFolder.CHECKPOINTS, keep)

    def path(self, step: int) -> Path:
        """Name the folder of a step's checkpoint."""
        return self.folder / checkpoint_name(step)

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, intact or not, ascending."""
        found = list[int]()
        if not self.folder.is_dir():
            return found
        for path in self.folder.iterdir():
            if (step := step_of(path)) is not None:
                found.append(step)
        return sorted(found)

    @property
    def best(self) -> int | None:
        """Step of the checkpoint that is the best; None where there is none."""
        step: int | None = durable.read_json(self.folder / RunFolder.BEST).get("step")
        # Its checkpoint may have been set aside as damaged, or deleted.
        return step if step in self.steps() else None

    @property
    def best_by(self) -> str:
        """The metric by which it is the best; empty where nobody says."""
        return str(durable.read_json(self.folder / RunFolder.BEST).get("metric", ""))

    def mark_best(self, step: int, metric: str) -> None:
        """Keep a checkpoint, where it is on disk, in place of the one that was the best before."""
        if step in self.steps():
            found = {"step": step, "metric": metric}
            durable.write_record(self.folder / RunFolder.BEST, found)

    def save(
        self,
        step: int,
        files: tensor_files.FileTensors,
        parts: Mapping[str, Any],
        world: World = _ONE_RANK,
    ) -> Path:
        """Write a checkpoint; when this returns its folder, it survives a power cut. Collective.

        `files` are what `assign_files` gave on each rank, `parts` what `capture` gave beside
        tensors, of which the main rank's is stored. Where that fails, the older ones are as they
        were, and nothing of this one is left.
        """
        unfinished = self.folder / world.on_main(lambda: self._begin(step))
        try:
            listed = dict[str, Any]()
            for written in world.on_all(lambda: self._write(step, unfinished, files)):
                listed |= written
            manifest = Manifest(step=step, files=listed, parts=dict(parts))
            world.on_main(lambda: self._commit(unfinished, manifest))
        except (SaveError, TypeError, ValueError):
            if world.is_main:
                durable.discard(unfinished)
            raise
        return self.path(step)

    def load(
        self, step: int | None = None, *, set_aside: bool = True, world: World = _ONE_RANK
    ) -> Loaded:
        """Verify the newest intact checkpoint, or the one of a step, and open it. Collective.

        Damaged ones are renamed to `damaged-...` with `set_aside`; not for a mere reader. Where
        none is intact, the text of `NoCheckpointError` says what is wrong with those there are.
        """
        steps = world.on_main(self.steps)
        if not steps or (step is not None and step not in steps):
            which = " here"
            if steps:
                which = f" of step {step}; has {', '.join(map(str, steps))}"
            raise NoCheckpointError(f"{self.folder}: no checkpoint{which}")
        messages: list[str] = []
        # All ranks must take the same one, so each is agreed on before the next is looked at.
        candidates = [step] if step is not None else steps[::-1]
        for candidate in candidates:
            loaded, fault = self._read(candidate, world)
            faults = [*filter(None, world.collect(fault))]
            if loaded is not None and not faults:
                self._intact.add(candidate)
                return replace(loaded, messages=tuple(messages))
            # In order of the alphabet: damage counts most.
            kind, text = min(faults)
            if kind == "other":
                raise NoCheckpointError(f"{self.path(candidate)}: {text}")
            message = f"{self.path(candidate)}: {kind}: {text}"
            if set_aside and kind == "damaged":
                message += world.on_main(partial(_set_aside, self.path(candidate)))
            messages.append(message)
        # The process that trains may have saved newer ones since, and pruned those listed.
        if not set_aside and world.on_main(self.steps) != steps:
            return self.load(step, set_aside=False, world=world)
        why = first_of(messages, "; ")
        raise NoCheckpointError(f"no intact checkpoint: {why}: start a new run, or restore a copy")

    def _begin(self, step: int) -> str:
        with durable.as_save_error(self.path(step)):
            durable.clean(self.folder)
            return durable.begin_folder(self.path(step)).name

    def _write(
        self, step: int, unfinished: Path, files: tensor_files.FileTensors
    ) -> dict[str, Any]:
        """Write one rank's files; gives size and digest of each, by its name."""
        needed, written = 0, dict[str, Any]()
        for tensors in files.values():
            needed += sum(tensor.nbytes for tensor in tensors.values())
        with durable.as_save_error(self.path(step), needed):
            for file, tensors in files.items():
                size, digest = tensor_files.write_tensors(unfinished / file, tensors)
                written[file] = {"size": size, "sha256": digest}
        return written

    def _commit(self, unfinished: Path, manifest: Manifest) -> None:
        """Give a checkpoint that all ranks have written its name, and prune older ones."""
        path = self.path(manifest.step)
        with durable.as_save_error(path):
            durable.write_file(unfinished / RunFolder.MANIFEST, [dump(manifest)])
            durable.publish_folder(unfinished, path)
        self._intact.add(manifest.step)
        self._prune()

    def _read(self, step: int, world: World) -> tuple[Loaded | None, tuple[str, str] | None]:
        try:
            return open_checkpoint(self.path(step), step, world), None
        except (DamagedError, OtherFormatError, OSError) as error:
            kind = _KINDS.get(type(error), "unreadable")
            return None, (kind, str(getattr(error, "strerror", error)))

    def _prune(self) -> None:
        """Delete all but the best and the `keep` newest intact ones; damaged ones do not count."""
        if self._keep is None:
            return
        num_intact, best = 0, self.best
        for step in reversed(self.steps()):
            try:
                if num_intact == self._keep:
                    if step != best:
                        durable.remove(self.path(step))
                    continue
                # One that another process wrote is read whole, once: a damaged one must not count.
                if step not in self._intact:
                    verify_folder(self.path(step), step)
                    self._intact.add(step)
                num_intact += 1
            except DamagedError:
                continue
            except OSError as error:
                _logger.warning("%s: could not be pruned: %s", self.path(step), error.strerror)


@final
class CheckpointWriter:
    """Saves checkpoints; ask `has_news` at each step, and call `close` at the end.

    `save`, `wait` and `close` are collective, and raise on all ranks or on none: a write behind the
    steps that failed raises its `SaveError` from the next of them. If `asynchronous`, the state is
    copied to main memory on the caller's thread, and written on another, one at a time.
    """

    def __init__(
        self, store: CheckpointStore, world: World = _ONE_RANK, *, asynchronous: bool = False
    ) -> None:
        self.store = store
        self._world = world
        self._thread: ThreadPoolExecutor | None = None
        if asynchronous:
            self._world = self._world.apart()
            # The interpreter joins this thread at exit: a write under way is never cut short by it.
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def save(
        self, step: int, tensors: Mapping[str, Tensor], parts: Mapping[str, Any]
    ) -> Path | None:
        """Save the state as it is now, even where the write before it turns out to have failed.

        Gives what is now on disk: this checkpoint, or the one before it, which `wait` would have
        given; None where that is known already.
        """
        files = tensor_files.assign_files(tensors, self._world.rank)
        if self._thread is None:
            return self.store.save(step, files, parts, self._world)
        try:
            return self.wait()
        finally:
            # Clones are in pageable memory; page-locked memory stays with the process.
            copied = dict[str, Mapping[str, Tensor]]()
            for file, inner in files.items():
                clones = map(Tensor.clone, in_main_memory(inner.values()))
                copied[file] = dict(zip(inner, clones, strict=True))
            state = copied, copy.deepcopy(dict(parts)), self._world
            self._in_flight = self._thread.submit(self.store.save, step, *state)

    @property
    def has_result(self) -> bool:
        """Whether a write ended, well or not; where one rank has news, all soon have."""
        return self._in_flight is not None and self._in_flight.done()

    def wait(self) -> Path | None:
        """Wait for what is being written, and return it; None where nothing is."""
        in_flight, self._in_flight = self._in_flight, None
        return None if in_flight is None else in_flight.result()

    def close(self) -> Path | None:
        """Wait likewise, and save no more. Closing twice does nothing."""
        try:
            return self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint, and return how that went as the end of a message."""
    aside = path.with_name(f"damaged-{path.name}")
    if os.path.lexists(aside):
        aside = path.with_name(f"{aside.name}-{uuid.uuid4().hex}")
    try:
        durable.rename(path, aside)
    except OSError as error:
        return f"; could not be set aside: {error.strerror}"
    return f"; set aside as {aside.name}"
