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

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> Path | None:
        """Save the state as it is now, even where the write before it turns out to have failed.

        Returns:
            What is now on disk: this checkpoint, or the one before it, which `wait` would have
            given; None where that is known already.
        """
        files = assign_files(tensors, self._world.rank)
        if self._thread is None:
            return self._store.save(step, files, meta, self._world)
        try:
            return self.wait()
        finally:
            state = copy_files(files), copy.deepcopy(dict(meta)), self._world
            self._in_flight = self._thread.submit(self._store.save, step, *state)

    @property
    def has_news(self) -> bool:
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
