"""Prepare and run a sweep: every job is checked before the first starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from rich.console import Console

from trainer.cli import saved_runs
from trainer.cli.compose import Composer, Job
from trainer.cli.exit_messages import print_error, print_out
from trainer.cli.overrides import classify, expand, parse, quote, value_of, without, word_of
from trainer.cli.start import must_stage, run_and_report, write_config
from trainer.cli.sweep_report import describe_end, report
from trainer.config.messages import line
from trainer.core.durable import read_json
from trainer.core.errors import INTERRUPTED, ConfigError, Preempted, TrainError
from trainer.core.signals import unheard
from trainer.launch.start import READING
from trainer.report.run_status import staged

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_LOGGING = "hydra/hydra_logging"


def run_sweep(lines: Sequence[str], composer: Composer) -> int:
    """Run every job of a sweep as typed, report them all, and give the exit code.

    Raises:
        ConfigError: one line per fault, of whichever job; none was started.
    """
    if "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun")
    overrides, faults = parse(lines)
    codes: list[int] = []
    all_done = interrupted = False
    with composer.open(overrides) as hydra:
        with unheard():
            sweep = prepare_sweep(overrides, faults, composer)
        try:
            hydra.multirun(composer.config_name, _task_of(sweep, composer, codes), [*sweep.lines])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            is_train = sweep.command == "train"
            all_done = not is_train or report(sweep.folder, sweep.jobs, Console())
    if interrupted:
        return Preempted.exit_code if Preempted.exit_code in codes else INTERRUPTED
    return 1 if any(codes) or not all_done else 0


@final
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A checked sweep.

    Attributes:
        command: what each of its jobs does.
        jobs: overrides of each; none where a sweeper chooses as it goes.
        lines: the overrides Hydra gets, several values in some of them.
        folder: the sweep folder.
        goes_on: `resume=auto` was typed.
    """

    command: str
    jobs: Sequence[Sequence[str]]
    lines: Sequence[str]
    folder: Path
    goes_on: bool


def prepare_sweep(overrides: Sequence[Override], faults: list[str], composer: Composer) -> Sweep:
    """Check every job of a sweep, over a composer that is open.

    Raises:
        ConfigError: one line per fault, of whichever job.
    """
    resume, command = value_of(overrides, "resume"), word_of(overrides, "command")
    if resume not in (None, saved_runs.AUTO):
        faults.append(line("resume", resume, "every job has its own folder; use resume=auto"))
    if command in READING or any(override.key_or_group == "run" for override in overrides):
        faults.append(
            "-m: jobs of a sweep make runs and read none; leave -m out, once for each run"
        )
    parts = classify(without(overrides, "resume"), composer.groups)
    hydra, jobs = parse(parts.hydra)[0], expand(parts.lines)
    checked: list[Job] = []
    faults += parts.faults
    for each in jobs:
        try:
            checked.append(composer.check([*hydra, *parse(each)[0]]))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    first = checked[0]
    folder = Path(str(first.composed.hydra.sweep.dir)).absolute()
    is_planned = first.composed.hydra.sweeper._target_ == _BASIC_SWEEPER
    if resume and not is_planned:
        raise ConfigError("resume=auto: this sweeper chooses its jobs anew; leave resume out")
    resumed = []
    if resume:
        outputs = Path(first.config.outputs).absolute()
        folder = saved_runs.newest_sweep(outputs, parts.lines) or folder
        resumed = [folder / str(n) for n in range(len(jobs)) if (folder / str(n)).exists()]
    own = [each for each in parts.hydra if not each.startswith("hydra.sweep.dir=")]
    own += [f"hydra.sweep.dir={quote(folder)}"]
    own += [f"hydra.output_subdir={saved_runs.next_subfolder(*resumed)}"]
    own += [] if any(_LOGGING in each for each in own) else [f"{_LOGGING}=none"]
    return Sweep(
        command=first.config.command,
        jobs=jobs if is_planned else (),
        lines=(*own, *parts.lines),
        folder=folder,
        goes_on=resume is not None,
    )


def _task_of(sweep: Sweep, composer: Composer, codes: list[int]) -> Callable[[Any], float]:
    """Make Hydra's task of a job; it gives the held-out loss, which sweepers minimise, or inf."""
    common = set.intersection(*map(set, sweep.jobs)) if len(sweep.jobs) > 1 else set()

    def task(_: object) -> float:
        record = HydraConfig.get()
        folder = Path(record.runtime.output_dir)
        number = f"{record.job.num} of {len(sweep.jobs)}" if sweep.jobs else record.job.num
        swept = (each.lstrip("+") for each in record.overrides.task if each not in common)
        print_out(f"job {number}: {' '.join(swept)}\n")
        code = _run_job(record.overrides.task, folder, composer, goes_on=sweep.goes_on)
        print_out(f"  {describe_end(folder)}\n")
        codes.append(code)
        if code == Preempted.exit_code:
            raise KeyboardInterrupt
        loss = read_json(folder / "result.json").get("eval_loss")
        return float(loss) if code == 0 and loss is not None else math.inf

    return task


def _run_job(lines: Sequence[str], folder: Path, composer: Composer, *, goes_on: bool) -> int:
    """Run one job in its folder, which Hydra made, or went on with, and give the exit code."""
    from trainer.report.console import BRIEF  # noqa: PLC0415 - imports torch

    try:
        overrides, faults = parse(lines)
        config = composer.check(overrides, faults).config
        if config.wandb.group is None:
            wandb = config.wandb.model_copy(update={"group": folder.parent.name})
            config = config.model_copy(update={"wandb": wandb})
        if goes_on and saved_runs.has_checkpoint(folder):
            saved_runs.refuse_another_step(folder, config)
            config = config.model_copy(update={"resume": str(folder)})
            if saved_runs.is_finished(folder, config):
                return 0
        with staged(folder) if must_stage(config, folder) else nullcontext(folder) as records:
            write_config(config, records, folder)
            with env_override({BRIEF: "1"} if config.command == "train" else {}):
                return run_and_report(config, folder)
    except TrainError as error:
        return print_error(error)
