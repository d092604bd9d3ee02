"""How a run goes and how it ended, in its status.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer import durable
from trainer.checkpoint.lock import hold_early
from trainer.checkpoint.status import Status, write_status
from trainer.errors import INTERRUPTED, Preempted, TrainError
from trainer.report import journal

METRICS_FILE = "metrics.jsonl"

STAGED = f"{durable.UNFINISHED}records"
"""Folder in a run folder that holds what its config.yaml and .hydra are to become."""


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Hold a run that is there, and keep its records as they are until `publish`.

    Yields:
        Where new records are to be written, each under its path in the run folder.

    Raises:
        RunHeldError: another process holds the run; nothing was written.
        SaveError: the folder cannot be written to.
    """
    with hold_early(folder):
        try:
            yield folder / STAGED
        finally:
            durable.discard(folder / STAGED)


def publish(folder: Path) -> None:
    """Let staged records be the run's, now that it goes on; nothing where none are staged.

    Raises:
        save_error: a `SaveError`: the disk refused.
    """
    new = folder / STAGED
    files = sorted(path for path in new.rglob("*") if path.is_file())
    try:
        for path in files:
            target = folder / path.relative_to(new)
            durable.make_folders(target.parent)
            durable.rename(path, target)
    except OSError as error:
        raise durable.save_error(error, folder) from error


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Write into status.json that a run goes on, and how it ended.

    Args:
        folder: the run folder, held by this process.

    Yields:
        Nothing.
    """
    write_status(folder, Status(state="running", step=saved_step(folder)))
    try:
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        is_preempted = isinstance(error, Preempted)
        status = Status(
            state="preempted" if is_preempted else "failed",
            exit_code=_exit_code(error),
            step=saved_step(folder) if is_preempted else last_step(folder),
            reason=reason.splitlines()[0],
        )
        write_status(folder, status)
        raise
    write_status(folder, Status(state="completed", exit_code=0, step=last_step(folder)))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, TrainError) else 1


def saved_step(folder: Path) -> int:
    """Read the step of the newest checkpoint from its name; 0 where there is none."""
    names = (path.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def last_step(folder: Path) -> int:
    """Read the last step from metrics.jsonl, the truth about a run."""
    return max((entry["step"] for entry in journal.read(folder / METRICS_FILE)), default=0)
