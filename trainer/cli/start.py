"""Starts a checked run: its records, its folder, Hydra's surroundings, then `launch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import yaml
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from trainer.cli import existing_runs
from trainer.cli.compose import Composer
from trainer.cli.exit_messages import complain, say_crash, tell
from trainer.cli.prepare import Ready
from trainer.config.run_config import RunConfig, to_plain
from trainer.config.secrets import mask_logs
from trainer.core import durable
from trainer.core.errors import ConfigError, SaveError, TrainError
from trainer.launch import start as room
from trainer.report.run_status import CONSENT_FILE, staged


def launch(config: RunConfig, folder: Path) -> int:
    """Run one command to its end; torch is imported here and not before.

    Returns:
        The exit code.
    """
    return room.run(config, folder)


def launch_and_tell(config: RunConfig, folder: Path) -> int:
    """Run one command to its end, and say on stderr how it failed, if it did.

    Returns:
        The exit code.

    Raises:
        ConfigError: left to the caller, who may take the folder back.
    """
    try:
        return launch(config, folder)
    except ConfigError:
        raise
    except TrainError as error:
        return complain(error)
    except Exception as error:
        return say_crash(error, folder)


def start(
    ready: Ready,
    composer: Composer,
    work: Callable[[RunConfig, Path], int] = launch_and_tell,
    *,
    sets_up_logging: bool = True,
) -> int:
    """Run one job as `hydra.main` would, with the config that is composed already.

    Composing it again, which takes Hydra two passes, could only give the same. A config error
    that shows only now, in a class of the user's own say, leaves no folder behind.

    Args:
        ready: the run.
        composer: its search path.
        work: what to do in the run folder; gives the exit code.
        sets_up_logging: whether Hydra's logging, into the run folder, replaces what is there.

    Returns:
        What `work` gave.

    Raises:
        TrainError: as raised by `work`.
        RunInUseError: the run to go on with is in use; nothing was written.
        _unwritable: a `SaveError`: Hydra could not write its records.
    """
    config, folder, composed = ready.job.config, ready.job.folder, ready.job.composed
    if ready.note is not None:
        tell(f"{ready.note}\n")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    codes: list[int] = []

    goes_on = ready.makes_folder and must_stage(config, folder)

    def task(cfg: DictConfig) -> None:
        if sets_up_logging:
            mask_logs()
        codes.append(_recorded_work(ready, records, work))

    with (
        staged(folder) if goes_on else nullcontext(folder) as records,
        composer.open(),
        room.listening(config),
    ):
        if goes_on:
            _stage_hydra(composed, records)
        callbacks = Callbacks(composed)
        callbacks.on_run_start(config=composed, config_name=composer.config_name)
        loader = GlobalHydra.instance().config_loader()
        try:
            ended = run_job(
                hydra_context=HydraContext(config_loader=loader, callbacks=callbacks),
                task_function=task,
                config=composed,
                job_dir_key="hydra.run.dir",
                job_subdir_key=None,
                configure_logging=sets_up_logging,
            )
        except OSError as failure:  # of Hydra's own records; the task's come back in `ended`
            raise _unwritable(failure, config, folder) from failure
        callbacks.on_run_end(config=composed, config_name=composer.config_name, job_return=ended)
    error = ended._return_value
    if isinstance(error, ConfigError) and made and not _is_worth_keeping(folder):
        _take_back(made)
    if isinstance(error, Exception):
        raise error
    return codes[0]


def _recorded_work(ready: Ready, records: Path, work: Callable[[RunConfig, Path], int]) -> int:
    if ready.makes_folder:
        write_config(ready.job.config, records, ready.job.folder)
    return work(ready.job.config, ready.job.folder)


def _unwritable(failure: OSError, config: RunConfig, folder: Path) -> SaveError:
    """Name the setting that says where a run goes, which is what can be changed."""
    is_below = folder.is_relative_to(Path(config.outputs).absolute())
    key, value = ("outputs", config.outputs) if is_below else ("hydra.run.dir", folder)
    return SaveError(f"{key}={value}: {durable.save_error(failure, folder)}")


def must_stage(config: RunConfig, folder: Path) -> bool:
    """Whether a run's own records are in the folder already, to stay until it goes on."""
    return config.command == "train" and (folder / "config.yaml").exists()


def _stage_hydra(composed: DictConfig, records: Path) -> None:
    """Send Hydra's records where they wait."""
    if composed.hydra.output_subdir is not None:
        with open_dict(composed.hydra):
            composed.hydra.output_subdir = f"{records.name}/{composed.hydra.output_subdir}"


def write_config(config: RunConfig, folder: Path, run: Path) -> None:
    """Write the resolved config, which holds no secret, into a folder, and the user's signature.

    Args:
        config: every class of which is consented to.
        folder: where the records of the run are written.
        run: its folder.

    Raises:
        save_error: a `SaveError`: it could not be written.
    """
    path = folder / "config.yaml"
    content = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True).encode()
    try:
        durable.make_folders(folder)
        durable.write_file_atomic(path, content)
        if config.command == "train":
            durable.write_json(
                folder / CONSENT_FILE, {"hmac_sha256": existing_runs.sign(run, folder)}
            )
    except OSError as error:
        raise durable.save_error(error, path, len(content)) from error


def _is_worth_keeping(folder: Path) -> bool:
    """Whether a run has saved anything, or has a traceback to read: what is refused may be late."""
    return any((folder / name).exists() for name in ("checkpoints", "errors"))


def _take_back(made: Sequence[Path]) -> None:
    """Delete the folder that this start made, and those above it if nothing else is in them."""
    durable.discard(made[0])
    with suppress(OSError):
        for folder in made[1:]:
            folder.rmdir()
