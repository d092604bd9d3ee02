"""When a checkpoint is written: before the next step, or behind the next steps."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from torch import Tensor

from trainer.checkpoint.rank_pieces import pieces, snapshot
from trainer.checkpoint.store import CheckpointStore
from trainer.core.world import World


class Saver(ABC):
    """Saves checkpoints; ask `has_news` at each step, and call `close` at the end.

    `save`, `wait` and `close` are collective, and raise on all ranks or on none: a write that
    failed raises its `SaveError` from the next of them.
    """

    @abstractmethod
    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Save the state as it is now, as `CheckpointStore.save` does."""

    @abstractmethod
    def check(self) -> Path | None:
        """Take the newest checkpoint that `save` or `wait` found durable. Never waits."""

    @property
    @abstractmethod
    def has_news(self) -> bool:
        """Whether a write ended, well or not, that `wait` would tell of. Never waits.

        Ranks may differ for a moment; where one has news, all soon have.
        """

    @abstractmethod
    def wait(self) -> Path | None:
        """Wait for what is being written; returns as `check` does."""

    @abstractmethod
    def close(self) -> Path | None:
        """Wait likewise, and save no more. Closing twice does nothing."""


@final
class DirectSaver(Saver):
    """Writes at once, from the live tensors, and holds the step up until the disk has it."""

    def __init__(self, store: CheckpointStore, world: World | None = None) -> None:
        self._store = store
        self._world = world or World()
        self._saved: Path | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Save the state.

        Raises:
            SaveError: as `CheckpointStore.save`.
        """
        self._saved = self._store.save(step, tensors, meta, self._world)

    @property
    def has_news(self) -> bool:
        """See the base class."""
        return self._saved is not None

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

    Costs one copy of what this rank stores in main memory. `save` waits for the write before it.
    """

    def __init__(self, store: CheckpointStore, world: World | None = None) -> None:
        self._store = store
        self._world = (world or World()).apart()
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
            state = snapshot(pieces(tensors, self._world.rank)), copy.deepcopy(dict(meta))
            self._in_flight = self._writer.submit(self._store.save, step, *state, self._world)

    @property
    def has_news(self) -> bool:
        """See the base class."""
        return self._saved is not None or (self._in_flight is not None and self._in_flight.done())

    def check(self) -> Path | None:
        """See the base class."""
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
