"""Start a checked run: its records, its folder, Hydra's surroundings, then the command itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import yaml

# `Hydra.run` would compose once more, in 0.3 s.
from hydra._internal.callbacks import Callbacks
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import open_dict

from trainer.cli.compose import CONFIG_NAME, Composer, Job
from trainer.cli.exit_messages import print_crash, print_error, print_notes, print_out
from trainer.cli.remote import sent
from trainer.config import consent
from trainer.config.run_config import RunConfig, to_plain
from trainer.config.secrets import mask_logs
from trainer.core import durable
from trainer.core.errors import ConfigError, NotExactError, Preempted, RankFailedError, TrainError
from trainer.core.run_folder import RunFolder
from trainer.launch import start as launch
from trainer.report.journal import truncate_after
from trainer.report.run_status import has_stepped, staged


def run_and_report(config: RunConfig, folder: Path) -> int:
    """Run one command to its end, print how it failed, if it did, and give the exit code.

    A `ConfigError` is left to the caller.
    """
    try:
        return launch.run(config, folder)
    except ConfigError:
        raise
    except TrainError as error:
        return print_error(error)
    except Exception as error:
        return print_crash(error, folder)


def start_job(job: Job, composer: Composer, *, is_python: bool = False) -> int:
    """Run one job as `hydra.main` would, with the config that is composed already.

    What fails before its first step leaves no folder behind. From Python, all errors are raised,
    and logging stays as it is.
    """
    made = [path for path in (job.folder, *job.folder.parents) if not path.exists()]
    if job.makes_folder:
        print_out(job.note, is_prose=True)
    # What reads a run may write for another program.
    elif job.note:
        print_notes([job.note.rstrip()])
    try:
        with sent(job.folder):
            try:
                return _start(job, composer, is_python=is_python)
            except BaseException as error:
                _take_back(made, error)
                raise
    except Exception as error:
        if is_python or isinstance(error, TrainError):
            raise
        return print_crash(error, job.folder)


def _start(job: Job, composer: Composer, *, is_python: bool) -> int:
    """Run one job among what Hydra has around it; raises whatever the command does."""
    config, folder, composed = job.config, job.folder, job.composed
    with (
        staging(config, folder) if job.makes_folder else nullcontext(folder) as records,
        composer.open() as hydra,
        launch.listening(config),
    ):
        if records != folder and composed.hydra.output_subdir is not None:
            # Hydra's records wait beside ours.
            with open_dict(composed.hydra):
                composed.hydra.output_subdir = f"{records.name}/{composed.hydra.output_subdir}"
        callbacks = Callbacks(composed)
        callbacks.on_run_start(config=composed, config_name=CONFIG_NAME)
        try:
            ended = run_job(
                hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
                task_function=lambda _: _run(job, records, is_python=is_python),
                config=composed,
                job_dir_key="hydra.run.dir",
                job_subdir_key=None,
                configure_logging=not is_python,
            )
        except OSError as failure:  # of Hydra's own records; the task's come back in `ended`
            raise durable.save_error(failure, folder) from failure
        callbacks.on_run_end(config=composed, config_name=CONFIG_NAME, job_return=ended)
    result = ended.return_value
    if isinstance(result, Exception):
        raise result
    return int(result)


def _run(job: Job, records: Path, *, is_python: bool) -> int | Exception:
    """Run the command; gives what it raises, for Hydra would print something beside it."""
    if not is_python:
        mask_logs()
    try:
        if job.makes_folder:
            write_config(job.config, records, job.folder)
        if job.forked is not None:
            run, step = job.forked
            _fork(RunFolder(run), step, job.folder)
        return launch.run(job.config, job.folder)
    except Exception as error:
        return error


def _fork(run: RunFolder, step: int, folder: Path) -> None:
    """Begin a run's folder with a checkpoint of another run, and its records up to there.

    Files are linked where the disk can do it, and copied elsewhere; none is ever changed.
    """
    checkpoint, target = run.checkpoint(step), RunFolder(folder).checkpoint(step)
    with durable.as_save_error(target):
        durable.make_folders(target.parent)
        for name in RunFolder.JOURNALS:
            if (run.path / name).is_file():
                shutil.copyfile(run.path / name, folder / name)
                truncate_after(folder / name, step)
        durable.write_json(folder / RunFolder.FORK, {"run": str(run), "step": step})
        unfinished = target.with_name(f"{durable.UNFINISHED}{target.name}")
        shutil.copytree(checkpoint, unfinished, copy_function=_link)
        durable.rename(unfinished, target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _take_back(made: Sequence[Path], error: BaseException) -> None:
    """Delete the folder of a command that failed, and those above it that were made with it.

    It stays where it has a step, a verdict, what ranks left or the error names, or may be gone
    on with.
    """
    stays = isinstance(error, Preempted | NotExactError | RankFailedError)
    if not made or stays or has_stepped(made[0]):
        return
    if str(made[0] / RunFolder.ERRORS) not in str(error):
        durable.discard(made[0])
        with suppress(OSError):
            for parent in made[1:]:
                parent.rmdir()


def staging(config: RunConfig, folder: Path) -> AbstractContextManager[Path]:
    """Give the folder for new records; those that a run has stay until it goes on."""
    goes_on = config.command == "train" and (folder / RunFolder.CONFIG).exists()
    return staged(folder) if goes_on else nullcontext(folder)


def write_config(config: RunConfig, folder: Path, run: Path) -> None:
    """Write the resolved config, which holds no secret, and note that the user made the run."""
    path = folder / RunFolder.CONFIG
    content = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True).encode()
    with durable.as_save_error(path, len(content)):
        durable.make_folders(folder)
        durable.write_file_atomic(path, content)
        if config.command == "train":
            RunFolder(run).record_start()
            consent.note_start(run, folder, config)
