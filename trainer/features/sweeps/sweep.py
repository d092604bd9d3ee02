"""Prepare and run a sweep: every job is checked before the first starts."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from trainer.cli.compose import CONFIG_NAME, Composer, Job
from trainer.cli.exit_messages import print_error
from trainer.cli.overrides import (
    classify,
    distinct,
    dotted,
    parse,
    quote,
    read_override,
    values_of,
    without,
    word_of,
)
from trainer.config.command_words import READING
from trainer.config.messages import clip, line
from trainer.core.errors import INTERRUPTED, ConfigError, Preempted, TrainError
from trainer.core.run_folder import AUTO, GRID_FILE, SEARCH_FILE, RunFolder
from trainer.core.signals import raise_on_interrupt
from trainer.features.sweeps import launchers, places, table
from trainer.features.sweeps.jobs import SAFE_PATH, STOP_FILE, Sweep, SweepTask, passing_signals_on
from trainer.features.sweeps.optuna_sweeper import OPTUNA, register_sweeper
from trainer.features.sweeps.search import Search, sweep_mode

_LOGGING = "hydra/hydra_logging"
_AT_USR1 = {"SUBMITIT_PREEMPT_SIGNAL": "USR1"}  # at which a run saves


def run_sweep(lines: Sequence[str], composer: Composer, faults: Sequence[str] = ()) -> int:
    """Run every job of a sweep as typed, report them all, and give the exit code.

    `faults` were found earlier, of what was typed. With a fault in any job none is started.
    """
    if "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("-m: a sweep starts its own ranks; run it without torchrun")
    overrides, wrong = parse(lines, is_typed=True)
    interrupted = failed = False
    with composer.open(overrides) as hydra:
        register_sweeper()
        sweep = prepare_sweep(overrides, [*faults, *wrong], composer)
        raise_on_interrupt()
        with places.in_use(sweep.folder):
            try:
                _start(sweep, composer, hydra)
            except KeyboardInterrupt:
                interrupted = True
            except (TrainError, HydraException):
                raise
            except Exception as error:  # of a launcher or sweeper, which may be anybody's
                failed = True
                print_error(TrainError(f"-m: {type(error).__name__}: {clip(str(error))}"))
            finally:
                codes = _codes(sweep)
                if sweep.command == "train":
                    table.report(sweep, Console())
    if interrupted or (sweep.is_parallel and (sweep.folder / STOP_FILE).exists()):
        return Preempted.exit_code if Preempted.exit_code in codes else INTERRUPTED
    faulty = {*codes} - {0, Preempted.exit_code}
    if failed or len(faulty) > 1:
        return 1
    return max(faulty or codes, default=0)


def _codes(sweep: Sweep) -> list[int]:
    """Read the exit code of every job, whichever process was to run it."""
    folders, _ = table.folders_and_words(sweep.folder, [{} for _ in sweep.jobs])
    # 1 of a job that did not end, or never began
    return [RunFolder(each).record(RunFolder.END).get("exit_code", 1) for each in folders]


def _start(sweep: Sweep, composer: Composer, hydra: Any) -> None:  # noqa: ANN401 - Hydra's own class
    task = SweepTask(composer=composer, sweep=sweep, host=socket.gethostname(), pid=os.getpid())
    # Jobs within this process hear its signals themselves.
    passing: AbstractContextManager[None] = nullcontext()
    if sweep.is_parallel:
        passing = passing_signals_on(sweep.folder)
    with passing:
        if not sweep.jobs:
            launchers.begin_search(sweep.folder, sweep.typed)
        with env_override({**SAFE_PATH, **os.environ, **_AT_USR1}):
            hydra.multirun(CONFIG_NAME, task, [*sweep.lines])


def prepare_sweep(overrides: Sequence[Override], faults: list[str], composer: Composer) -> Sweep:
    """Check every job of a sweep, over a composer that is open."""
    resume, command = word_of(overrides, "resume"), word_of(overrides, "command")
    if resume not in (None, AUTO):
        faults.append(line("resume", resume, "every job has its own folder; use resume=auto"))
    if command in READING or any(override.key_or_group == "run" for override in overrides):
        faults.append("-m: a sweep can only train; run this command without -m, once for each run")
    parts = classify(without(overrides, "resume"), composer.groups)
    hydra, typed = parse(parts.hydra)[0], parts.lines
    sweeper = composer.compose(parts.hydra).hydra.sweeper
    is_search, is_optuna = sweeper._target_ != launchers.BASIC_SWEEPER, sweeper._target_ == OPTUNA
    if is_optuna:
        typed = [*_in_settings(sweeper, typed), *typed]
    if is_search:
        # It could have more combinations than anybody can check.
        jobs, most = cover(typed), None
    else:
        jobs = expand(typed)
        most = len(jobs)
    checked = _check(jobs, hydra, composer, [*faults, *parts.faults])
    first = checked[0]
    record = first.composed.hydra
    found = None
    if resume is not None:
        if is_search and not is_optuna:
            raise ConfigError("resume=auto: this sweeper chooses its jobs anew; leave resume out")
        file = SEARCH_FILE if is_optuna else GRID_FILE
        found = places.newest_sweep(first.config.outputs, typed, file)
    folder = found or Path(str(record.sweep.dir)).absolute()
    search = None
    if is_optuna:
        search = Search.of(record.sweeper, folder, first.config, typed)
        most = search.num_trials
    slots = launchers.slots_of(checked, record, folder, most)
    own = _with_folder(parts.hydra, folder, goes_on=resume is not None and folder.exists())
    own += launchers.settings_of(record, parts.hydra, slots, seed=first.config.seed)
    if not any(_LOGGING in each for each in own):
        own.append(f"{_LOGGING}=none")
    return Sweep(
        command=first.config.command,
        jobs=() if is_search else jobs,
        lines=(*own, *typed),
        folder=folder,
        goes_on=resume is not None,
        metric=first.config.sweep.metric,
        mode=sweep_mode(first.config),
        search=search,
        typed=typed,
        slots=slots,
        is_parallel=record.launcher._target_ != launchers.BASIC_LAUNCHER,
    )


def _check(
    jobs: Iterable[Sequence[str]],
    hydra: Sequence[Override],
    composer: Composer,
    faults: Sequence[str],
) -> list[Job]:
    """Check jobs; all faults are named, and those found earlier."""
    checked, faults = list[Job](), [*faults]
    for each in jobs:
        try:
            checked.append(composer.check([*hydra, *parse(each)[0]]))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*distinct(faults))
    return checked


def _in_settings(sweeper: DictConfig, typed: Sequence[str]) -> Iterator[str]:
    """Give what `hydra.sweeper.params` searches, as if it was typed; what is typed comes first."""
    keys = {dotted(read_override(line)) for line in typed}
    for key, value in (sweeper.params or {}).items():
        if dotted(read_override(f"{key}={value}")) not in keys:
            yield f"++{key}={value}"


def _with_folder(typed: Sequence[str], folder: Path, *, goes_on: bool) -> list[str]:
    """Give the settings of Hydra that were typed, with a sweep's folder in place of a typed one."""
    own = [each for each in typed if not each.startswith("hydra.sweep.dir=")]
    # What a job began with stays; its records of going on are beside them.
    records = RunFolder.RESUMED if goes_on else RunFolder.HYDRA
    return [*own, f"hydra.sweep.dir={quote(folder)}", f"hydra.output_subdir={records}"]


def expand(lines: Iterable[str]) -> list[list[str]]:
    """Expand a sweep: every combination of the values of every swept override, in Hydra's order."""
    return [*map(list, itertools.product(*map(_each, lines)))]


def cover(lines: Iterable[str]) -> list[list[str]]:
    """List jobs that together have every value of every override, and both ends of intervals."""
    columns = [*map(_each, lines)]
    jobs = list[list[str]]()
    for number in range(max(map(len, columns), default=1)):
        # Of an override with fewer values than the longest, they come again.
        jobs.append([column[number % len(column)] for column in columns])
    return jobs


def _each(line: str) -> list[str]:
    key, equals, _ = line.partition("=")
    return [f"{key}{equals}{value}" for value in values_of(read_override(line))]
