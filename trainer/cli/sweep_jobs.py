"""Run one job of a sweep, in whichever process a launcher starts it.

Jobs of other processes find each other through the sweep's folder: a lock for each slot, which is
a GPU or a share of the processors, and a file that says how many signals asked the sweep to stop.
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal, Self, final

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override

from trainer.cli import saved_runs
from trainer.cli.compose import Composer
from trainer.cli.exit_messages import print_error, print_out
from trainer.cli.overrides import dotted, parse, read_override
from trainer.cli.start import must_stage, run_and_report, write_config
from trainer.config.metric_mode import title_of
from trainer.config.secrets import without_secrets
from trainer.core.durable import make_folders, write_json
from trainer.core.errors import Preempted, TrainError
from trainer.core.own_code import OWN_CODE
from trainer.core.run_folder import RunFolder
from trainer.core.signals import STOPPING, TOGETHER_S, StopFlag, caught, stop_signals
from trainer.report.journal import EVAL_SECONDS, stream
from trainer.report.run_status import staged

STOP_FILE = ".stop"  # in the folder of a sweep in other processes: as many bytes as signals came
_GOING = ".going"  # there, too: locked while the sweep's own process lives
_SLOTS = ".slots"
_POLL_S = 0.2
_UNENDED = (None, 0, Preempted.exit_code)  # exit codes of jobs that are run again, or are done

_slots: list[tuple[int, IO[str]]] = []
"""The slot of this process, and its lock: a process that has used a GPU cannot take another."""


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
        threads = max(1, self.cores // (self.count * self.ranks))
        found = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
        if self.gpus:
            own = (slot * self.ranks + rank for rank in range(self.ranks))
            names = dict.fromkeys(self.gpus[number % len(self.gpus)] for number in own)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        return found

    def take(self) -> int:
        """Wait for a slot that no other process has; a process keeps its own."""
        make_folders(self.folder / _SLOTS)
        while not _slots:
            for number in range(self.count):
                if (file := _lock(self.folder / _SLOTS / str(number))) is not None:
                    _slots.append((number, file))
                    break
            else:
                time.sleep(_POLL_S)
        return _slots[0][0]


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
    sweeper: str  # its class
    storage: object  # of the study of a search, where it has one
    typed: Sequence[str]  # `lines` without settings of Hydra
    slots: Slots | None  # of jobs that run at once on this machine
    is_parallel: bool  # jobs run in other processes


@final
@dataclass(frozen=True, kw_only=True)
class SweepTask:
    """Hydra's task of a job; it gives what sweepers minimise, the metric by its sign, or inf."""

    composer: Composer
    sweep: Sweep
    own_folder: Path | None  # of the user's code
    safe_path: str | None  # PYTHONSAFEPATH as the user has it
    process: tuple[str, int]  # host and number of the process that the sweep began in

    @classmethod
    def of(cls, sweep: Sweep, composer: Composer) -> Self:
        """Make the task of a sweep that begins in this process."""
        return cls(
            composer=composer,
            sweep=sweep,
            own_folder=OWN_CODE.folder,
            safe_path=os.environ.get("PYTHONSAFEPATH"),
            process=(socket.gethostname(), os.getpid()),
        )

    def __call__(self, _: object) -> float:
        """Run the job that Hydra is at."""
        OWN_CODE.folder = self.own_folder  # a launcher may have started another process
        if self.safe_path is None:  # what the user's code starts is their own matter
            os.environ["PYTHONSAFEPATH"] = ""  # off
        record = HydraConfig.get()
        folder = Path(record.runtime.output_dir)
        lines = [str(each) for each in record.overrides.task]
        if self.process == (socket.gethostname(), os.getpid()):
            listening = stop_signals() if self.sweep.command == "train" else nullcontext(StopFlag())
            with listening as stop:
                code = self._run(lines, folder, record.job.num)
            if stop.is_set:
                raise KeyboardInterrupt
        else:
            code = self._run_elsewhere(lines, folder, record.job.num)
        value = self._value(folder, code)
        sign = 1 if self.sweep.mode == "min" else -1
        return math.inf if value is None else sign * value

    def _value(self, folder: Path, code: int) -> float | None:
        """Read the metric of a job, also where its own time ended it; None of one that failed."""
        return value_of(folder, self.sweep.metric) if code in (0, Preempted.exit_code) else None

    def _run_elsewhere(self, lines: Sequence[str], folder: Path, job: int) -> int:
        """Run a job in a process that is not the sweep's; one that was stopped does not begin."""
        if self.process[0] == socket.gethostname():
            with suppress(PermissionError):  # it leads a session of its own
                os.setpgid(0, 0)  # a terminal's signals come once, through the sweep's file
        done = threading.Event()
        with stop_signals():
            threading.Thread(target=self._watch, args=(done,), daemon=True).start()
            try:
                slots = self.sweep.slots
                if slots is not None and self.process[0] == socket.gethostname():
                    os.environ.update(slots.environment(slots.take()))
                code = Preempted.exit_code
                if not self._num_signals():
                    code = self._run(lines, folder, job)
            finally:
                done.set()
        if self._is_orphan():
            os._exit(code)  # joblib's would wait for more jobs, its GPU's memory with it
        if code == Preempted.exit_code and not self._num_signals() and _is_requeued():
            os.kill(os.getpid(), signal.SIGUSR1)  # submitit puts the job back into the queue
        return code

    def _num_signals(self) -> int:
        """Count the signals that asked the sweep to stop; its end without a word is one."""
        file = self.sweep.folder / STOP_FILE
        if file.exists():
            return file.stat().st_size
        return int(self._is_orphan())

    def _is_orphan(self) -> bool:
        """Whether the sweep's own process was killed: its lock is free then."""
        is_local = self.process[0] == socket.gethostname()
        if is_local and (lock := _lock(self.sweep.folder / _GOING)) is not None:
            lock.close()
            return True
        return False

    def _watch(self, done: threading.Event) -> None:
        sent = 0
        while not done.wait(_POLL_S):
            if self._num_signals() > sent:
                sent += 1
                os.kill(os.getpid(), signal.SIGTERM)
                done.wait(2 * TOGETHER_S)

    def _run(self, lines: Sequence[str], folder: Path, job: int) -> int:
        number = f"{job} of {len(self.sweep.jobs)}" if self.sweep.jobs else job
        common = {
            dotted(each)
            for each in map(read_override, self.sweep.typed)
            if not each.is_sweep_override()
        }
        swept = (line.lstrip("+") for line in lines if dotted(read_override(line)) not in common)
        print_out(f"job {number}: {' '.join(swept)}\n")
        code, reason = self._run_once(lines, folder)
        if code and not reason:
            reason = str(RunFolder(folder).status().get("reason") or "")
        write_json(folder / RunFolder.END, {"exit_code": code, "reason": reason or None})
        value = self._value(folder, code)
        shown = "" if value is None else f", {title_of(self.sweep.metric)} {value:.4f}"
        # Those of jobs that run at once come in any order.
        print_out(f"job {job}: exit code {code}{shown}\n")
        return code

    def _run_once(self, lines: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run one job in its folder, which Hydra made, or went on with.

        Gives the exit code, and why it could not begin.
        """
        from trainer.report.console import BRIEF  # noqa: PLC0415 - imports torch

        before, goes_on = RunFolder(folder).record(RunFolder.END), self.sweep.goes_on
        if goes_on and not self.sweep.jobs and before.get("exit_code") not in _UNENDED:
            # The values of the jobs behind it were chosen by how it ended.
            return int(before["exit_code"]), str(before.get("reason") or "")
        try:
            overrides, faults = parse(lines)
            config = self.composer.check(overrides, faults).config
            # Slurm may have put the job back into its queue
            goes_on = goes_on or "SLURM_RESTART_COUNT" in os.environ
            run = RunFolder(folder)
            if goes_on and run.steps():
                saved_runs.refuse_changes(run, config)
                config = config.model_copy(update={"resume": str(folder)})
                if saved_runs.is_finished(run, config):
                    return 0, ""
            with staged(folder) if must_stage(config, folder) else nullcontext(folder) as records:
                write_config(config, records, folder)
                with env_override({BRIEF: "1"} if config.command == "train" else {}):
                    return run_and_report(config, folder), ""
        except TrainError as error:
            reason = without_secrets(str(error).splitlines()[0], os.environ)
            return print_error(error), reason


def _lock(path: Path) -> IO[str] | None:
    """Lock a file as long as it is open; None where another process has it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _is_requeued() -> bool:
    """Whether submitit waits for a signal to put this job back into the queue of Slurm."""
    by_slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    return by_slurm and callable(signal.getsignal(signal.SIGUSR1))


@contextmanager
def passing_signals_on(folder: Path) -> Iterator[None]:
    """Let the first signal reach jobs in other processes, and the second one raise."""
    file, last = folder / STOP_FILE, [-math.inf]

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - last[0] > TOGETHER_S:
            is_second, last[0] = file.exists(), now
            with file.open("a") as stop:
                stop.write(".")
            if is_second:
                raise KeyboardInterrupt
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), STOPPING)

    make_folders(folder)
    file.unlink(missing_ok=True)
    before = {each: signal.signal(each, on_signal) for each in caught()}
    try:
        with (folder / _GOING).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def last_figures(folder: Path) -> dict[str, Any]:
    """Give a job's last figures: of training, then those of the held-out data.

    A job that did not come to its last step has those of its evaluations so far.
    """
    result = RunFolder(folder).record(RunFolder.RESULT)
    entries = () if result else stream(folder / RunFolder.METRICS)
    so_far = {n: v for e in entries for n, v in e.items() if n.startswith("eval_")}
    so_far.pop(EVAL_SECONDS, None)
    metrics = result.get("metrics", so_far)
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    named = {f"eval_{n.removeprefix('eval_')}": v for n, v in pairs if isinstance(v, int | float)}
    figures = {"step": RunFolder(folder).status().get("step"), **result}
    names = dict.fromkeys(["step", "loss", "eval_loss", *named, "tokens_per_second", "seconds"])
    return {name: (named | figures).get(name) for name in names}


def value_of(folder: Path, metric: str) -> float | None:
    """Read a metric of a job; None where it gave none, or no number."""
    value = last_figures(folder).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
