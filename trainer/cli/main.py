"""The command line: argv -> checked jobs -> launch. The only `hydra.main`.

Nothing heavy is imported until it is needed: `--help` imports neither Hydra nor torch, and torch
waits until every job of the command line has been checked.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from trainer import __version__
from trainer.cli.argv import Request, split
from trainer.cli.exit_messages import (
    FULL_ERROR,
    complain,
    hold_on,
    is_led,
    let_go,
    piped,
    say_crash,
    tell,
)
from trainer.core.durable import read_json
from trainer.core.errors import INTERRUPTED, ConfigError, Preempted, TrainError
from trainer.core.signals import unheard

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.cli.compose import Composer
    from trainer.cli.prepare import Ready, Sweep

RECORDS: Mapping[str, str] = {
    "train": "result.json",
    "plan": "plan.json",
    "verify": "verify.json",
    "evaluate": "evaluate.json",
}
"""What each command writes its findings into, in the run folder."""

_LOGGING = "hydra/hydra_logging"
_ERASE = "\x1b[2K"
"""What a terminal takes for: empty this line."""


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run from Python ended.

    Attributes:
        folder: the run folder.
        exit_code: as of the command line.
        result: what the command found, as in the file that it writes; empty for export.
    """

    folder: Path
    exit_code: int
    result: Mapping[str, Any]


def main() -> None:
    """Run the command line of this process, and exit."""
    hold_on()
    code = run(sys.argv[1:])
    let_go()
    mirror = sys.modules.get("trainer.report.wandb")
    if mirror is not None and mirror.is_hanging():
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: the arguments after the program's name.

    Returns:
        The exit code. What is wrong is said on stderr, one line per fault.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainError as error:
        return complain(error)
    except Exception as error:
        return say_crash(error)


def train(config: Mapping[str, Any] | Sequence[str] = (), **hydra_flags: str) -> Run:
    """Run from Python or a notebook what a command line runs.

    Args:
        config: a composed config, nested mappings of some settings, or a command and overrides
            as they are typed: `train(["verify", "batch.global=64", "accum=budget"])`.
        hydra_flags: `config_dir="..."` for a folder of options of one's own.

    Returns:
        Where the run is and how it ended.

    Raises:
        TrainError: what the command line would print; its `exit_code` is the command line's.
    """
    from trainer.cli.prepare import prepare_run  # noqa: PLC0415
    from trainer.cli.python_api import overrides_of  # noqa: PLC0415
    from trainer.cli.start import launch, start  # noqa: PLC0415

    _make_importable(Path.cwd())
    flags = {f"--{name.replace('_', '-')}": value for name, value in hydra_flags.items()}
    composer = _composer(Request(command=None, flags=flags, overrides=()))
    ready = prepare_run(overrides_of(config, composer), composer)
    folder = ready.job.folder
    code = 0
    if ready.done is None:
        code = start(ready, composer, launch, sets_up_logging=False)
    record = RECORDS.get(ready.job.config.command)
    result = {} if record is None else read_json(folder / record)
    return Run(folder=folder, exit_code=code, result=result)


def _run(argv: Sequence[str]) -> int:
    request = split(argv)
    if "--help" in request.flags:
        from trainer.cli.help_page import show  # noqa: PLC0415

        with piped():
            show(request.flags.get("--config-dir"))
        return 0
    if "--version" in request.flags:
        tell(f"train {__version__}\n")
        return 0
    _make_importable(Path.cwd())
    if request.only_shows:
        with piped():
            return _ask_hydra([*request.hydra_flags(), *request.overrides])
    composer = _composer(request)
    lines = request.lines
    if request.is_sweep or "hydra.mode=MULTIRUN" in lines:
        return _run_sweep(request, lines, composer)
    return _run_single(request, lines, composer)


def _run_single(request: Request, lines: Sequence[str], composer: Composer) -> int:
    with unheard():
        from trainer.cli.prepare import prepare_run  # noqa: PLC0415
        from trainer.cli.start import launch_and_tell, start  # noqa: PLC0415

        ready = prepare_run(lines, composer)
    if "--cfg" in request.flags:
        with piped():
            return _ask_hydra([*request.hydra_flags(), *ready.job.lines])
    if ready.done is not None:
        tell(f"{ready.done}\n")
        return 0
    if is_led(ready.job.config):
        # The first rank makes the folder, and tells the others which it is.
        return launch_and_tell(ready.job.config, ready.job.folder)
    return start(ready, composer)


def _run_sweep(request: Request, lines: Sequence[str], composer: Composer) -> int:
    from trainer.cli.prepare import prepare_sweep  # noqa: PLC0415

    if "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun")
    with unheard():
        sweep = prepare_sweep(lines, composer)
    has_launcher = any("hydra/launcher=" in line for line in sweep.lines)
    if not has_launcher and any(ready.job.config.parallel.nodes > 1 for ready in sweep.ready):
        raise ConfigError(
            "-m: jobs over several nodes need a launcher that starts them there, such as "
            "hydra/launcher=submitit_slurm"
        )
    codes: list[int] = []
    flags = [flag for flag in request.hydra_flags() if flag != "--multirun"]
    quiet = [] if any(_LOGGING in line for line in sweep.lines) else [f"{_LOGGING}=none"]
    interrupted = False
    try:
        _ask_hydra([*flags, "--multirun", *quiet, *sweep.lines], _job_of(sweep, composer, codes))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        all_done = _report(sweep)
    if interrupted:
        return Preempted.exit_code if Preempted.exit_code in codes else INTERRUPTED
    return 1 if any(codes) or not all_done else 0


def _report(sweep: Sweep) -> bool:
    """Show what became of the jobs, and say whether all did what they should."""
    if sweep.ready[0].job.config.command != "train":
        return True
    from rich.console import Console  # noqa: PLC0415

    from trainer.cli.sweep import report  # noqa: PLC0415

    planned = [ready.job.lines for ready in sweep.ready] if sweep.is_planned else []
    jobs = report(sweep.folder, planned, Console())
    return all(job.is_completed for job in jobs)


def _job_of(sweep: Sweep, composer: Composer, codes: list[int]) -> Callable[[Any], float]:
    """Make the task that Hydra runs for every job of a sweep.

    It gives the held-out loss, which sweepers minimise; infinity for a job that failed.
    """
    known = {ready.job.lines: ready for ready in sweep.ready}
    common = set.intersection(*(set(lines) for lines in known)) if len(known) > 1 else set()

    def job(cfg: DictConfig) -> float:
        from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415

        from trainer.cli.sweep import job_line  # noqa: PLC0415
        from trainer.core.format import shown_path  # noqa: PLC0415
        from trainer.report.console import LOG_FILE  # noqa: PLC0415

        record = HydraConfig.get()
        folder = Path(record.runtime.output_dir)
        lines = tuple(record.overrides.task)
        varied = [line for line in lines if line not in common]
        number = f"{record.job.num} of {len(known)}" if sweep.is_planned else record.job.num
        label = f"job {number}: {' '.join(varied)}"
        running = f"{label}: running, see {shown_path(folder / LOG_FILE)}"
        is_watched = sys.stdout.isatty()
        # A line that wraps cannot be written over.
        goes_away = is_watched and len(running) < shutil.get_terminal_size().columns
        tell(running + ("\r" if goes_away else "\n") if is_watched else "")
        code = _run_job(lines, folder, known.get(lines), composer)
        tell(f"{_ERASE if goes_away else ''}{label}: {job_line(folder)}\n")
        codes.append(code)
        if code == Preempted.exit_code:
            raise KeyboardInterrupt
        loss = read_json(folder / "result.json").get("eval_loss")
        return float(loss) if code == 0 and loss is not None else math.inf

    return job


def _run_job(lines: Sequence[str], folder: Path, ready: Ready | None, composer: Composer) -> int:
    """Run one job of a sweep in its folder.

    Args:
        lines: its overrides.
        folder: Hydra made it.
        ready: the checked job; `None` where the sweeper chooses as it goes.
        composer: to check it now.

    Returns:
        The exit code.
    """
    from trainer.cli.prepare import prepare_job  # noqa: PLC0415
    from trainer.cli.start import launch_and_tell, must_stage, write_config  # noqa: PLC0415
    from trainer.report.console import BRIEF  # noqa: PLC0415
    from trainer.report.run_status import staged  # noqa: PLC0415

    if ready is not None and ready.done is not None:
        return 0
    try:
        config = prepare_job(lines, folder, composer) if ready is None else ready.job.config
        with staged(folder) if must_stage(config, folder) else nullcontext(folder) as records:
            write_config(config, records, folder)
            with _variable(BRIEF, "1" if config.command == "train" else None):
                return launch_and_tell(config, folder)
    except TrainError as error:
        return complain(error)


def _ask_hydra(argv: Sequence[str], job: Callable[[Any], float] | None = None) -> int:
    """Hand a command line to Hydra itself.

    Args:
        argv: flags and overrides, as Hydra wants them.
        job: what a sweep runs.

    Raises:
        ConfigError: what Hydra would print with a traceback or advice that does not fit.
    """
    import hydra  # noqa: PLC0415

    from trainer.cli.compose import CONFIG_NAME, VERSION_BASE, ComposeError, explain  # noqa: PLC0415
    from trainer.config import recipes  # noqa: PLC0415
    from trainer.config.keys import data_dir  # noqa: PLC0415

    typed = os.environ.get(FULL_ERROR)

    def task(cfg: DictConfig) -> float | None:
        """Run the job with the environment as the user has it."""
        with _variable(FULL_ERROR, typed):
            return None if job is None else job(cfg)

    recipes.register()
    decorate = hydra.main(
        version_base=VERSION_BASE,
        config_path=str(data_dir("conf")),
        config_name=CONFIG_NAME,
    )
    before, sys.argv = sys.argv, ["train", *argv]
    try:
        with _variable(FULL_ERROR, "1"):  # Hydra then raises what it would print
            decorate(task)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ComposeError as error:
        raise ConfigError(*explain(error)) from error
    finally:
        sys.argv = before
    return 0


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable, or take it away, for as long as the context lasts.

    Yields:
        Nothing.
    """
    before = os.environ.get(name)
    _set_variable(name, value)
    try:
        yield
    finally:
        _set_variable(name, before)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _composer(request: Request) -> Composer:
    from trainer.cli.compose import CONFIG_NAME, Composer  # noqa: PLC0415
    from trainer.config.keys import data_dir  # noqa: PLC0415

    flags = request.flags
    own, path = flags.get("--config-dir"), flags.get("--config-path")
    return Composer(
        config_folder=Path(path).absolute() if path else data_dir("conf"),
        config_name=flags.get("--config-name", CONFIG_NAME),
        own_folder=Path(own).absolute() if own else None,
    )


def _make_importable(folder: Path) -> None:
    """Let `_target_` name a module of a folder, here and in the processes that are started."""
    if str(folder) not in sys.path:
        # Last, so that a file named like an installed package is not taken for it.
        sys.path.append(str(folder))
