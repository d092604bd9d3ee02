"""Prepare and run a sweep: every job is checked before the first starts."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from trainer.cli import saved_runs
from trainer.cli.compose import CheckedRun, Composer
from trainer.cli.exit_messages import print_error, print_out
from trainer.cli.hydra_main import run_hydra, variable
from trainer.cli.overrides import (
    Classified,
    ConfigGroups,
    classify,
    expand,
    is_of,
    parse,
    quote,
    value_of,
    without,
)
from trainer.cli.prepare import READING, Ready, after, parse_typed, search_path, word_of
from trainer.cli.start import must_stage, run_and_report, write_config
from trainer.cli.sweep_report import job_line, report
from trainer.config.messages import line as fault
from trainer.config.run_config import RunConfig
from trainer.core.durable import read_json
from trainer.core.errors import INTERRUPTED, ConfigError, Preempted, TrainError
from trainer.core.format import shown_path
from trainer.core.signals import unheard
from trainer.report.run_status import staged

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_LOGGING = "hydra/hydra_logging"
_ERASE = "\x1b[2K"
"""What a terminal takes for: empty this line."""


@final
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A checked sweep.

    Attributes:
        ready: its jobs in order; `job.lines` are the overrides that Hydra will give each.
        lines: the overrides Hydra gets, several values in some of them.
        folder: the sweep folder.
        is_planned: its jobs are those that run; not so where a sweeper chooses as it goes.
    """

    ready: tuple[Ready, ...]
    lines: tuple[str, ...]
    folder: Path
    is_planned: bool


def prepare_sweep(lines: Sequence[str], composer: Composer) -> Sweep:
    """Prepare every job of a sweep from overrides as typed.

    Raises:
        ConfigError: one line per fault, of whichever job.
    """
    overrides, faults = parse_typed(lines)
    with composer.open(), after(faults):
        groups = composer.groups(search_path(overrides))
        parts = classify(without(overrides, "resume"), groups)
        resume = value_of(overrides, "resume")
        goes_on = resume == saved_runs.AUTO
        with after(parts.faults):
            if resume is not None and not goes_on:
                text = "every job of a sweep has its own folder; use resume=auto"
                raise ConfigError(fault("resume", resume, text))
            is_reading = word_of(overrides, "command") in READING
            if is_reading or any(is_of(each, "run") for each in overrides):
                text = "jobs of a sweep make runs and read none; leave -m out, once for each run"
                raise ConfigError(f"-m: {text}")
            checked = _check_all(parts, composer, groups)
        return _placed(parts, checked, groups, goes_on=goes_on)


def _check_all(parts: Classified, composer: Composer, groups: ConfigGroups) -> list[CheckedRun]:
    """Check every combination of swept values.

    Raises:
        ConfigError: all faults of all jobs.
    """
    hydra, _ = parse(parts.hydra)
    checked: list[CheckedRun] = []
    faults: list[str] = []
    for lines in expand([*parts.choices, *parts.value_lines(())], groups):
        try:
            checked.append(composer.check([*hydra, *parse(lines)[0]], groups))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return checked


def _placed(
    parts: Classified, checked: Sequence[CheckedRun], groups: ConfigGroups, *, goes_on: bool
) -> Sweep:
    first = checked[0]
    is_planned = first.composed.hydra.sweeper._target_ == _BASIC_SWEEPER
    if goes_on and not is_planned:
        raise ConfigError("resume=auto: this sweeper chooses its jobs anew; leave resume out")
    swept = (*parts.choices, *parts.value_lines(first.known))
    folder = first.sweep_folder
    if goes_on:
        outputs = Path(first.config.outputs).absolute()
        folder = saved_runs.newest_sweep(outputs, swept) or folder
    ready = tuple(
        _place(job, tuple(lines), folder / str(number), goes_on=goes_on)
        for number, (job, lines) in enumerate(zip(checked, expand(swept, groups), strict=True))
    )
    subfolder = saved_runs.next_subfolder(*(r.job.folder for r in ready if r.is_resumed))
    hydra = [line for line in parts.hydra if not line.startswith("hydra.sweep.dir=")]
    hydra += [f"hydra.sweep.dir={quote(folder)}", f"hydra.output_subdir={subfolder}"]
    return Sweep(ready=ready, lines=(*hydra, *swept), folder=folder, is_planned=is_planned)


def _place(job: CheckedRun, lines: tuple[str, ...], folder: Path, *, goes_on: bool) -> Ready:
    """Place a checked job in the sweep folder, where it may have been before."""
    is_resumed = goes_on and saved_runs.has_checkpoint(folder)
    done = None
    config = job.config
    if is_resumed:
        saved_runs.refuse_another_step(folder, config)
        config = config.model_copy(update={"resume": str(folder)})
        done = f"{folder} is done" if saved_runs.is_finished(folder, config) else None
    if config.wandb.group is None:
        wandb = config.wandb.model_copy(update={"group": folder.parent.name})
        config = config.model_copy(update={"wandb": wandb})
    placed = replace(job, config=config, folder=folder, lines=lines)
    return Ready(job=placed, is_resumed=is_resumed, done=done)


def run_sweep(lines: Sequence[str], flags: Sequence[str], composer: Composer) -> int:
    """Run every job of a sweep, and report them all.

    Args:
        lines: overrides as typed.
        flags: of Hydra.
        composer: the search path.

    Returns:
        The exit code.

    Raises:
        ConfigError: one line per fault, of whichever job; none was started.
    """
    if "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun")
    with unheard():
        sweep = prepare_sweep(lines, composer)
    codes: list[int] = []
    quiet = [] if any(_LOGGING in line for line in sweep.lines) else [f"{_LOGGING}=none"]
    own = [flag for flag in flags if flag != "--multirun"]
    interrupted = False
    try:
        run_hydra([*own, "--multirun", *quiet, *sweep.lines], _job_of(sweep, composer, codes))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        all_done = True
        if sweep.ready[0].job.config.command == "train":
            planned = [ready.job.lines for ready in sweep.ready] if sweep.is_planned else []
            jobs = report(sweep.folder, planned, Console())
            all_done = all(job.is_completed for job in jobs)
    if interrupted:
        return Preempted.exit_code if Preempted.exit_code in codes else INTERRUPTED
    return 1 if any(codes) or not all_done else 0


def _job_of(sweep: Sweep, composer: Composer, codes: list[int]) -> Callable[[Any], float]:
    """Make the task that Hydra runs for every job of a sweep.

    It gives the held-out loss, which sweepers minimise; infinity for a job that failed.
    """
    known = {ready.job.lines: ready for ready in sweep.ready}
    common = set.intersection(*(set(lines) for lines in known)) if len(known) > 1 else set()

    def job(_: object) -> float:
        from trainer.report.console import LOG_FILE  # noqa: PLC0415 - imports torch

        record = HydraConfig.get()
        folder = Path(record.runtime.output_dir)
        lines = tuple(record.overrides.task)
        number = f"{record.job.num} of {len(known)}" if sweep.is_planned else record.job.num
        label = f"job {number}: {' '.join(line for line in lines if line not in common)}"
        running = f"{label}: running, see {shown_path(folder / LOG_FILE)}"
        is_watched = sys.stdout.isatty()
        # A line that wraps cannot be written over.
        goes_away = is_watched and len(running) < shutil.get_terminal_size().columns
        print_out(running + ("\r" if goes_away else "\n") if is_watched else "")
        code = _run_job(lines, folder, known.get(lines), composer)
        print_out(f"{_ERASE if goes_away else ''}{label}: {job_line(folder)}\n")
        codes.append(code)
        if code == Preempted.exit_code:
            raise KeyboardInterrupt
        loss = read_json(folder / "result.json").get("eval_loss")
        return float(loss) if code == 0 and loss is not None else math.inf

    return job


def _run_job(lines: Sequence[str], folder: Path, ready: Ready | None, composer: Composer) -> int:
    """Run one job of a sweep in its folder, which Hydra made.

    Args:
        lines: its overrides.
        folder: of the job.
        ready: the checked job; `None` where the sweeper chooses as it goes.
        composer: to check it now.

    Returns:
        The exit code.
    """
    from trainer.report.console import BRIEF  # noqa: PLC0415 - imports torch

    if ready is not None and ready.done is not None:
        return 0
    try:
        config = ready.job.config if ready else _check_chosen(lines, folder, composer)
        with staged(folder) if must_stage(config, folder) else nullcontext(folder) as records:
            write_config(config, records, folder)
            with variable(BRIEF, "1" if config.command == "train" else None):
                return run_and_report(config, folder)
    except TrainError as error:
        return print_error(error)


def _check_chosen(lines: Sequence[str], folder: Path, composer: Composer) -> RunConfig:
    """Check one job of a sweeper that chooses as it goes.

    Raises:
        ConfigError: one line per fault.
    """
    overrides, faults = parse(lines)
    with composer.open(), after(faults):
        job = composer.check(overrides, composer.groups(search_path(overrides)))
        return _place(job, tuple(lines), folder, goes_on=False).job.config
