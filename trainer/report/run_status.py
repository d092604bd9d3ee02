"""Record how a run goes and how it ended, in its status.json. Imports no torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.config import consent
from trainer.config.run_config import RunConfig
from trainer.config.secrets import without_secrets
from trainer.config.trackers import sends
from trainer.core import durable, errors, signals
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder, hold
from trainer.core.user_code import described, excerpt
from trainer.report import journal
from trainer.report.views import views, write_views

# Holds what config.yaml and .hydra are to become
STAGED = f"{durable.UNFINISHED}records"
_REFUSALS = (errors.ConfigError, errors.DataError, errors.NoCheckpointError)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Lock a run, and give another folder for its new records, until `publish`."""
    with hold(folder):
        try:
            yield folder / STAGED
        finally:
            durable.discard(folder / STAGED)


def publish(folder: Path) -> None:
    """Let staged records be the run's, now that it goes on; `SaveError` if the disk refuses."""
    with durable.as_save_error(folder):
        files = _files(folder / STAGED)
        if files:  # what the run failed by before
            durable.discard(folder / RunFolder.ERRORS)
            RunFolder(folder).write_status("running", saved_step(folder))
        for path in files:
            target = folder / path.relative_to(folder / STAGED)
            durable.make_folders(target.parent)
            durable.rename(path, target)


@contextmanager
def recorded(config: RunConfig, folder: Path) -> Iterator[None]:
    """Write into status.json that a run, held by this process, goes on, and how it ended.

    With its traceback and what shows it, where it failed; of one that completed the reporter
    writes the latter. Notes of the error say what is saved, and how to go on.

    A resumed run goes on once its records are published: one that is refused stays as it was.
    """
    run = RunFolder(folder)
    if not _files(folder / STAGED):
        run.write_status("running", saved_step(folder))
    signals.show_when_stopped(lambda: f"so far {'; then '.join(_saved(config, folder))}")
    try:
        yield
    except BaseException as error:
        if excerpt(error) or not isinstance(error, errors.TrainError | KeyboardInterrupt):
            keep_traceback(error, folder, 0)
        if isinstance(error, _REFUSALS) and _files(folder / STAGED):
            raise
        reason, code = described(error), 1
        if isinstance(error, errors.TrainError):
            reason, code = str(error), error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            reason, code = "interrupted", errors.INTERRUPTED
        reason = without_secrets(reason or type(error).__name__, os.environ).splitlines()[0]
        if isinstance(error, errors.Preempted):
            run.write_status("preempted", saved_step(folder), code, reason)
        else:
            run.write_status("failed", last_step(folder), code, reason)
        write_views(folder)
        if config.command == "train":
            for note in _notes(config, folder, error):
                error.add_note(note)
        raise
    run.write_status("completed", last_step(folder), 0)


def _notes(config: RunConfig, folder: Path, error: BaseException) -> Iterator[str]:
    """Say after which step a run ended, what is saved, what shows it, and how to go on.

    One that was stopped in good order says the first and the last itself.
    """
    is_orderly = isinstance(error, errors.Preempted)
    if not has_stepped(folder):
        # What a user can act on, such as a mistake, is one line.
        if not isinstance(error, errors.TrainError):
            yield "ended before its first step was done: nothing is saved"
        return
    what, how = _saved(config, folder)
    if not is_orderly:
        yield f"ended after step {last_step(folder)}; {what}"
    for view in views().values():
        if (folder / view.file).is_file():
            yield f"see {shown_path(folder / view.file)}"
    if not is_orderly:
        yield how


def _saved(config: RunConfig, folder: Path) -> tuple[str, str]:
    """Say what is saved of a run, and how it goes on."""
    what, how = "nothing is saved", "begin again with: "
    if saved := saved_step(folder):
        what, how = f"step {saved} is saved", errors.GO_ON
    return what, f"{how}{to_go_on(config, folder)}"


def trusting(config: RunConfig, run: Path) -> list[str]:
    """Give what has to be typed for classes and options of one's own that a run folder names."""
    words = list[str]()
    if config.config_dir is not None:
        words.append(f"--config-dir={shown_path(Path(config.config_dir))}")
    if config.packages and not consent.is_noted(run):
        # In quotes: to a shell the brackets are a pattern of file names.
        words.append(f"'trust=[{','.join(config.packages)}]'")
    return words


def to_go_on(config: RunConfig, folder: Path) -> str:
    """Say what to type for a run to go on, or to begin again where nothing is saved yet."""
    words = ["train", f"resume={shown_path(folder)}", *trusting(config, folder)]
    for tracker in config.logger:
        for key, value in tracker.params.items():
            if sends(tracker.target, key, value):
                words.append(f"{tracker.name}.{key}={value}")
    if config.init and not saved_step(folder):
        words.append(f"init={config.init}")
        if config.step != "last":
            words.append(f"step={config.step}")
    return " ".join(words)


def keep_traceback(error: BaseException, folder: Path, rank: int) -> Path | None:
    """Write a traceback into the run folder, and say where; None where there is no room."""
    path = RunFolder(folder).traceback(rank)
    whole = without_secrets("".join(traceback.format_exception(error)), os.environ)
    with suppress(OSError):
        durable.make_folders(path.parent)
        durable.write_file_atomic(path, whole.encode())
        return path
    return None


def drop_empty(log: Path) -> None:
    """Keep no log that says nothing, and no folder of none."""
    with suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
            log.parent.rmdir()


def _files(folder: Path) -> list[Path]:
    return sorted(filter(Path.is_file, folder.rglob("*")))


def saved_step(folder: Path) -> int:
    """Read the step of the newest checkpoint; 0 where there is none."""
    return max(RunFolder(folder).steps(), default=0)


def has_stepped(folder: Path) -> bool:
    """Whether a run took a step; those that a fork begins with are another's."""
    begun = RunFolder(folder).record(RunFolder.FORK).get("step", 0)
    return bool(max(saved_step(folder), last_step(folder)) > begun)


def last_step(folder: Path) -> int:
    """Read the last step from metrics.jsonl, the truth about a run."""
    return max((entry["step"] for entry in journal.stream(folder / RunFolder.METRICS)), default=0)
