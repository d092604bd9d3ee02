"""Run one job of a sweep, in whichever process a launcher starts it.

A job in another process looks at the sweep's folder: a file there asks it to stop, and a lock tells
whether the sweep's own process lives. Locks give each job its GPUs, or its share of the processors.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    chdir,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, final

import yaml
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override

from trainer.cli import saved_runs
from trainer.cli.compose import Composer
from trainer.cli.exit_messages import print_error, print_out
from trainer.cli.overrides import dotted, parse, read_override
from trainer.cli.start import run_and_report, staging, write_config
from trainer.config.metric_mode import title_of
from trainer.config.secrets import without_secrets
from trainer.core.durable import discard, make_folders, write_file_atomic, write_json
from trainer.core.errors import Preempted, TrainError
from trainer.core.own_code import OWN_CODE
from trainer.core.run_folder import RunFolder, RunInUseError, hold, is_locked
from trainer.core.signals import StopFlag, stop_signals
from trainer.features.sweeps.search import TRIAL, Search
from trainer.features.sweeps.table import value_of

SAFE_PATH = {"PYTHONSAFEPATH": "sweep"}
"""Launchers start Python with `-m`, which has the current folder first; any text forbids that."""

STOP_FILE = ".stop"
"""File in the folder of a sweep whose jobs, in other processes, are to stop."""

_POLL_S = 0.2
_taken = ExitStack()  # the slot of this process, until it ends


@final
@dataclass(frozen=True, kw_only=True)
class Slots:
    """What jobs that run at once share: so many at a time, each with its own GPUs and threads."""

    folder: Path  # of the sweep
    count: int
    gpus: Sequence[str]  # names for CUDA_VISIBLE_DEVICES
    ranks: int  # of each job
    cores: int

    def environment(self, slot: int) -> dict[str, str]:
        """Give what a job of a slot finds in its environment."""
        found = dict[str, str]()
        # Else each rank starts a thread for every processor of the machine.
        if "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, self.cores // (self.count * self.ranks))
            found["OMP_NUM_THREADS"] = str(threads)
        if self.gpus:
            first, names = slot * self.ranks, dict[str, None]()
            for number in range(first, first + self.ranks):
                # Slots of more ranks than there are GPUs share them.
                names[self.gpus[number % len(self.gpus)]] = None
            found["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        return found


@cache  # a process that has used a GPU cannot take another
def take_slot(folder: Path, count: int) -> int:
    """Wait for a slot that no other process has; this one has it until it ends."""
    while True:
        for number in range(count):
            slot = folder / ".slots" / str(number)
            make_folders(slot)
            with suppress(RunInUseError):
                _taken.enter_context(hold(slot))
                return number


@final
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A checked sweep."""

    command: str  # what each of its jobs does
    jobs: Sequence[Sequence[str]]  # overrides of each; none where a sweeper chooses as it goes
    lines: Sequence[str]  # the overrides Hydra gets, several values in some of them
    folder: Path
    goes_on: bool  # `resume=auto` was typed
    metric: str  # that the jobs are ranked by
    mode: Literal["min", "max"]  # which value of it is better
    search: Search | None  # by Optuna; another sweeper chooses in its own way
    typed: Sequence[str]  # `lines` without settings of Hydra
    slots: Slots | None  # of jobs that run at once on this machine
    is_parallel: bool  # jobs run in other processes


@final
@dataclass(frozen=True, kw_only=True)
class SweepTask:
    """Hydra's task of a job; it gives what sweepers minimise, the metric by its sign, or inf."""

    composer: Composer
    sweep: Sweep
    host: str  # of the sweep's own process
    pid: int

    def __call__(self, _: object) -> float:
        """Run the job that Hydra is at."""
        if os.environ.get("PYTHONSAFEPATH") in SAFE_PATH.values():
            # What the user's code starts is their own matter.
            os.environ["PYTHONSAFEPATH"] = ""
        record = HydraConfig.get()
        if (self.host, self.pid) == (socket.gethostname(), os.getpid()):
            listening: AbstractContextManager[StopFlag] = nullcontext(StopFlag())
            # Only a training saves when it is stopped.
            if self.sweep.command == "train":
                listening = stop_signals()
            with listening as stop:
                code = self._run(record, stop)
            if stop.is_set:
                raise KeyboardInterrupt
        else:
            code = self._run_elsewhere(record)
        value = self._value(Path(record.runtime.output_dir), code)
        # Sweepers minimise; a job without a value is worse than any that has one.
        if value is None:
            return math.inf
        return value if self.sweep.mode == "min" else -value

    def _value(self, folder: Path, code: int) -> float | None:
        """Read the metric of a job, also where its own time ended it; None of one that failed."""
        if code in (0, Preempted.exit_code):
            return value_of(folder, self.sweep.metric)
        return None

    def _run_elsewhere(self, record: HydraConf) -> int:
        """Run a job in a process that is not the sweep's; one that was stopped does not begin."""
        parent, slots = os.getppid(), self.sweep.slots
        done = threading.Event()
        with stop_signals() as stop:
            if self._is_local:
                with suppress(PermissionError):  # it leads a session of its own
                    os.setpgid(0, 0)  # so that a terminal's Ctrl-C comes once, by way of the sweep
                if slots is not None:
                    number = take_slot(slots.folder, slots.count)
                    os.environ.update(slots.environment(number))
            threading.Thread(target=self._watch, args=(done,), daemon=True).start()
            try:
                code = Preempted.exit_code
                if not self._is_over():
                    code = self._run(record, stop)
            finally:
                done.set()
        if os.getppid() != parent:
            # The sweep has ended, and joblib's process would wait for more jobs, with the memory
            # of its GPU.
            os._exit(code)
        is_slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
        has_handler = callable(signal.getsignal(signal.SIGUSR1))
        if code == Preempted.exit_code and is_slurm and has_handler and not self._is_over():
            os.kill(os.getpid(), signal.SIGUSR1)  # submitit puts the job back into the queue
        return code

    @property
    def _is_local(self) -> bool:
        return self.host == socket.gethostname()

    def _is_over(self) -> bool:
        """Whether a signal stopped the sweep; or `kill -9`, after which its lock is free."""
        is_stopped = (self.sweep.folder / STOP_FILE).exists()
        return is_stopped or (self._is_local and not is_locked(self.sweep.folder))

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(_POLL_S):
            if self._is_over():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _run(self, record: HydraConf, stop: StopFlag) -> int:
        """Run a job; print how it begins and ends, and note the latter for the table."""
        job, folder, search = record.job.num, Path(record.runtime.output_dir), self.sweep.search
        lines, variables, trial = [*map(str, record.overrides.task)], {}, None
        ended = RunFolder(folder).record(RunFolder.END)
        if search is not None:
            if (trial := search.take(job)) is None:
                # Hydra made it, and a job without a run counts as one that failed.
                discard(folder)
                return 0
            lines, variables = search.lines(trial), {TRIAL: search.variable(trial)}
            # What Hydra wrote has none of the values that were chosen.
            _write_overrides(record, lines)
            if trial.state.is_finished():
                return int(ended.get("exit_code", 0))
        # How many jobs a search will have is not known.
        of_all = f" of {len(self.sweep.jobs)}" if self.sweep.jobs else ""
        print_out(f"job {job}{of_all}: {self._chosen(lines)}\n")
        try:
            code, reason = self._run_once(lines, record, variables), ""
        except TrainError as error:
            code = print_error(error)
            reason = without_secrets(str(error).splitlines()[0], os.environ)
        if code and not reason:
            reason = str(RunFolder(folder).status().get("reason") or "")
        value, state = self._value(folder, code), None
        # One that is to go on has its trial still.
        if search is not None and not (code == Preempted.exit_code and stop.is_set):
            state = search.tell(trial, value)
        record_of_end = {"exit_code": code, "reason": reason or None, "state": state}
        write_json(folder / RunFolder.END, record_of_end)
        # With the job's number, since those of jobs that run at once come in any order.
        end = f"job {job}: exit code {code}"
        if value is not None:
            end += f", {title_of(self.sweep.metric)} {value:.4f}"
        if state is not None:
            end += f", {state} after step {RunFolder(folder).last_step()}"
        print_out(f"{end}\n")
        return code

    def _chosen(self, lines: Sequence[str]) -> str:
        """Give the overrides of a job that not all jobs have."""
        typed = map(read_override, self.sweep.typed)
        common = {dotted(each) for each in typed if not each.is_sweep_override()}
        # A search may also choose what is not typed, but stands in its own settings.
        own = [line.lstrip("+") for line in lines if dotted(read_override(line)) not in common]
        return " ".join(own)

    def _run_once(
        self, lines: Sequence[str], record: HydraConf, variables: Mapping[str, str]
    ) -> int:
        """Run one job in its folder, which Hydra made, or went on with; gives the exit code."""
        from trainer.report.console import BRIEF  # noqa: PLC0415 - imports torch

        folder = Path(record.runtime.output_dir)
        overrides, faults = parse(lines)
        # Hydra may have changed the folder (`hydra.job.chdir`); paths were typed in the first.
        with chdir(record.runtime.cwd):
            OWN_CODE.folder = Path.cwd()
            job = self.composer.check(overrides, faults)
        # Hydra's record gets paths in full, so that the job can go on alone from anywhere.
        _write_overrides(record, job.lines)
        config, run = job.config, RunFolder(folder)
        # Slurm may have put the job back into its queue.
        goes_on = self.sweep.goes_on or "SLURM_RESTART_COUNT" in os.environ
        if goes_on and run.steps():
            saved_runs.refuse_changes(run, config)
            config = config.model_copy(update={"resume": str(folder)})
            if saved_runs.is_finished(run, config):
                return 0
        if config.command == "train":
            variables = {BRIEF: "1", **variables}
        with staging(config, folder) as records:
            write_config(config, records, folder)
            with env_override(dict(variables)):
                return run_and_report(config, folder)


def _write_overrides(record: HydraConf, lines: Sequence[str]) -> None:
    """Write the overrides of a job into its folder, in place of what Hydra has there."""
    text = yaml.safe_dump([line.lstrip("+") for line in lines])
    records = Path(record.runtime.output_dir) / str(record.output_subdir)
    write_file_atomic(records / RunFolder.OVERRIDES, text.encode())


@contextmanager
def passing_signals_on(folder: Path) -> Iterator[None]:
    """Let the first signal ask jobs in other processes to stop; the second ends this one."""
    ended, file = threading.Event(), folder / STOP_FILE

    def pass_on() -> None:
        while not ended.wait(_POLL_S):
            if stop.is_set:
                file.touch()

    file.unlink(missing_ok=True)
    with stop_signals() as stop:
        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
