"""When a checkpoint is written: before the next step, or behind the next steps."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from trainer.checkpoint.shards import find_aliases
from trainer.checkpoint.store import CheckpointStore


class Saver(ABC):
    """Saves checkpoints; call `check` at each step and `close` at the end.

    A write that failed raises its `SaveError` from the next call of any method.
    """

    @abstractmethod
    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Save the state as it is now, as `CheckpointStore.save` does."""

    @abstractmethod
    def check(self) -> Path | None:
        """Take the newest checkpoint that became durable since the last call. Never waits."""

    @abstractmethod
    def wait(self) -> Path | None:
        """Wait for what is being written; returns as `check` does."""

    @abstractmethod
    def close(self) -> Path | None:
        """Wait likewise, and save no more. Closing twice does nothing."""


@final
class DirectSaver(Saver):
    """Writes at once, from the live tensors, and holds the step up until the disk has it."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._saved: Path | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Save the state.

        Raises:
            SaveError: as `CheckpointStore.save`.
        """
        self._saved = self._store.save(step, tensors, meta)

    def check(self) -> Path | None:
        """Take the newest checkpoint."""
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> Path | None:
        """Take the newest checkpoint."""
        return self.check()

    def close(self) -> Path | None:
        """Take the newest checkpoint."""
        return self.check()


@final
class AsyncSaver(Saver):
    """Copies the state on the caller's thread and writes it on another, one at a time.

    Costs one copy of the state in main memory. `save` waits for the write before it.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        # The interpreter joins this thread at exit: a write under way is never cut short by it.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None
        self._saved: Path | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy the state, then write it behind the caller's back.

        Raises:
            SaveError: the write before this one failed; this state is being written all the same.
        """
        try:
            self._settle()
        finally:
            self._in_flight = self._writer.submit(
                self._store.save, step, snapshot(tensors), copy.deepcopy(dict(meta))
            )

    def check(self) -> Path | None:
        """Take the newest checkpoint that became durable.

        Raises:
            SaveError: a write failed.
        """
        if self._in_flight is not None and self._in_flight.done():
            self._settle()
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> Path | None:
        """Wait for the write under way.

        Raises:
            SaveError: it failed.
        """
        self._settle()
        return self.check()

    def close(self) -> Path | None:
        """Wait for the write under way, and end the thread.

        Raises:
            SaveError: it failed.
        """
        try:
            self._settle()
        finally:
            self._writer.shutdown()
        return self.check()

    def _settle(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._saved = in_flight.result()


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, out of reach of later steps; what was tied stays tied."""
    aliases = find_aliases(tensors)
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if name not in aliases
    }
    return {name: copies[aliases.get(name, name)] for name in tensors}
