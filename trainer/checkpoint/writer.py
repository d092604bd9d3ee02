"""Write checkpoints before the next step, or behind the next steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from torch import Tensor

from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tensor_files import assign_files, copy_files
from trainer.core.world import World


@final
class CheckpointWriter:
    """Saves checkpoints; ask `has_news` at each step, and call `close` at the end.

    `save`, `wait` and `close` are collective, and raise on all ranks or on none: a write behind the
    steps that failed raises its `SaveError` from the next of them. If `asynchronous`, the state is
    copied to main memory on the caller's thread, and written on another, one at a time.
    """

    def __init__(
        self, store: CheckpointStore, world: World | None = None, *, asynchronous: bool = False
    ) -> None:
        self._store = store
        self._world = world or World()
        self._thread: ThreadPoolExecutor | None = None
        if asynchronous:
            self._world = self._world.apart()
            # The interpreter joins this thread at exit: a write under way is never cut short by it.
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None
        self._saved: Path | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Save the state as it is now, even where the write before it turns out to have failed."""
        if self._thread is None:
            self._saved = self._store.save(step, tensors, meta, self._world)
            return
        try:
            self._finish()
        finally:
            files = copy_files(assign_files(tensors, self._world.rank))
            state = files, copy.deepcopy(dict(meta)), self._world
            self._in_flight = self._thread.submit(self._store.save_files, step, *state)

    @property
    def has_news(self) -> bool:
        """Whether a write ended, well or not; where one rank has news, all soon have."""
        return self._saved is not None or (self._in_flight is not None and self._in_flight.done())

    def take_saved(self) -> Path | None:
        """Return the newest checkpoint that `save` or `wait` found durable, once. Never waits."""
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> Path | None:
        """Wait for what is being written; returns as `take_saved` does."""
        self._finish()
        return self.take_saved()

    def close(self) -> Path | None:
        """Wait likewise, and save no more. Closing twice does nothing."""
        try:
            return self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _finish(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._saved = in_flight.result()
