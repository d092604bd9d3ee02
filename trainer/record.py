"""How a run goes and how it ended, in its status.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.status import Status, write_status
from trainer.errors import Preempted, TrainError
from trainer.report import journal

METRICS_FILE = "metrics.jsonl"


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Write into status.json that a run goes on, and how it ended.

    Args:
        folder: the run folder, held by this process.

    Yields:
        Nothing.
    """
    write_status(folder, Status(state="running"))
    try:
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        status = Status(
            state="preempted" if isinstance(error, Preempted) else "failed",
            exit_code=error.exit_code if isinstance(error, TrainError) else 1,
            step=last_step(folder),
            reason=reason.splitlines()[0],
        )
        write_status(folder, status)
        raise
    write_status(folder, Status(state="completed", exit_code=0, step=last_step(folder)))


def last_step(folder: Path) -> int:
    """Read the last step from metrics.jsonl, the truth about a run."""
    return max((entry["step"] for entry in journal.read(folder / METRICS_FILE)), default=0)
