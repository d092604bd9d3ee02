"""Start a checked run: its records, its folder, Hydra's surroundings, then the command itself."""

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

from trainer.cli import saved_runs
from trainer.cli.compose import Composer
from trainer.cli.exit_messages import print_crash, print_error, print_out
from trainer.cli.prepare import Ready
from trainer.config.run_config import RunConfig, to_plain
from trainer.config.secrets import mask_logs
from trainer.core import durable
from trainer.core.errors import ConfigError, SaveError, TrainError
from trainer.launch import start as room
from trainer.report.run_status import CONSENT_FILE, staged


def run_and_report(config: RunConfig, folder: Path) -> int:
    """Run one command to its end, and print on stderr how it failed, if it did.

    Returns:
        The exit code.

    Raises:
        ConfigError: left to the caller, who may take the folder back.
    """
    try:
        return room.run(config, folder)
    except ConfigError:
        raise
    except TrainError as error:
        return print_error(error)
    except Exception as error:
        return print_crash(error, folder)


def start(
    ready: Ready,
    composer: Composer,
    work: Callable[[RunConfig, Path], int] = run_and_report,
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
    print_out(ready.note and f"{ready.note}\n")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    codes: list[int] = []
    goes_on = ready.makes_folder and must_stage(config, folder)

    def task(cfg: DictConfig) -> None:
        if sets_up_logging:
            mask_logs()
        if ready.makes_folder:
            write_config(config, records, folder)
        codes.append(work(config, folder))

    with (
        staged(folder) if goes_on else nullcontext(folder) as records,
        composer.open(),
        room.listening(config),
    ):
        if goes_on and composed.hydra.output_subdir is not None:
            with open_dict(composed.hydra):  # Hydra's records wait beside ours
                composed.hydra.output_subdir = f"{records.name}/{composed.hydra.output_subdir}"
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
    if isinstance(error, ConfigError):
        _take_back(made)
    if isinstance(error, Exception):
        raise error
    return codes[0]


def _unwritable(failure: OSError, config: RunConfig, folder: Path) -> SaveError:
    """Name the setting that chooses where a run goes, which is what can be changed."""
    is_below = folder.is_relative_to(Path(config.outputs).absolute())
    where = f"outputs={config.outputs}" if is_below else f"hydra.run.dir={folder}"
    return SaveError(f"{where}: {durable.save_error(failure, folder)}")


def _take_back(made: Sequence[Path]) -> None:
    """Delete a folder that this start made and nothing was saved in, and those above it if empty.

    Args:
        made: the folder, and those above it that were made with it.
    """
    if made and not any((made[0] / name).exists() for name in ("checkpoints", "errors")):
        durable.discard(made[0])
        with suppress(OSError):
            for parent in made[1:]:
                parent.rmdir()


def must_stage(config: RunConfig, folder: Path) -> bool:
    """Whether a run's own records are in the folder already, to stay until it goes on."""
    return config.command == "train" and (folder / "config.yaml").exists()


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
            signature = saved_runs.sign_run(run, folder)
            durable.write_json(folder / CONSENT_FILE, {"hmac_sha256": signature})
    except OSError as error:
        raise durable.save_error(error, path, len(content)) from error
