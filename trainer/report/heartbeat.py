"""Refresh the status of a run while it goes on, so that a watchdog sees that it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from trainer.config.command_words import READING
from trainer.config.run_config import RunConfig
from trainer.core.errors import SaveError
from trainer.core.rank_progress import RankProgress
from trainer.core.run_folder import RunFolder

EVERY_S = 15.0  # of the 30 that are promised, since a disk may be slow


@contextmanager
def heartbeat(
    config: RunConfig, folder: Path, progress: RankProgress, rank: int = 0
) -> Iterator[None]:
    """Let the first rank refresh status.json from a thread, unless the run is only read."""
    is_over = Event()

    def beat() -> None:
        while not is_over.wait(EVERY_S):
            # A full disk is the checkpoints' matter.
            with suppress(SaveError):
                RunFolder(folder).refresh_status(progress.read())

    thread = Thread(target=beat, name="heartbeat", daemon=True)
    if rank == 0 and config.command not in READING:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.is_alive():
            thread.join()
