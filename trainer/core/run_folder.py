"""Name, read and write what is in the folder of a run. Imports no torch.

Everything in it may be missing, torn or a stranger's: what cannot be read counts as empty.

One process may use a run at a time, by `flock` on a file in it: the system frees the lock when its
holder ends, however it ends, so a file that lies around means nothing. What the file says is for
the error message alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import yaml

from trainer.core import durable
from trainer.core.errors import TrainError
from trainer.core.rank_progress import RankPosition

RunState = Literal["running", "completed", "preempted", "failed"]

UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)  # what `read_yaml` raises
AUTO = "auto"  # typed for the newest run

_status_lock = threading.Lock()  # held while a status is written

_handles: dict[Path, int] = {}  # by run folder, the lock files that this process has locked

# What was typed for a sweep, in its folder: of a grid, of a search
SWEEP_FILES = GRID_FILE, SEARCH_FILE = "multirun.yaml", "search.yaml"

# Of folders below `outputs`: multirun/DAY/SWEEP/JOB
_DEPTH = 4
# Of a config.yaml that has only what is ours
_MOST_CHARACTERS = 1 << 20
_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})", re.ASCII)


def checkpoint_name(step: int) -> str:
    """Name the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Read the step of a checkpoint off the name of its folder; None of any other folder."""
    match = _STEP.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


@final
@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    CONFIG = "config.yaml"
    PLAN, SPLITS, STATUS, RESULT = "plan.json", "splits.json", "status.json", "result.json"
    METRICS, SAMPLES, TEXTS = "metrics.jsonl", "samples.jsonl", "generated.jsonl"
    JOURNALS = (METRICS, SAMPLES, TEXTS)  # an entry has its step; a run that goes on cuts them
    LOG, VERIFY, EVALUATION = "train.log", "verify.json", "evaluate.json"
    CHECKPOINTS, ERRORS, LOCK = "checkpoints", "errors", ".lock"
    BEST = "best.json"  # which of the checkpoints is
    MANIFEST = "manifest.json"  # in each of them
    FORK = "forked.json"  # which checkpoint of another run this one began with
    HYDRA, OVERRIDES = ".hydra", "overrides.yaml"
    RESUMED = ".hydra/resumed"  # Hydra's records of the last time that the run went on
    START = ".hydra/started.json"
    END = ".hydra/ended.json"  # of a job of a sweep: its exit code, and why

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_run(self) -> bool:
        """Whether it is one of a run."""
        names = self.CONFIG, self.METRICS, self.CHECKPOINTS
        # Of pathlib it raises where a folder may not be looked into.
        return any(os.path.exists(self.path / name) for name in names)  # noqa: PTH110

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that it is a job of; None of a single run."""
        folder = self.path.parent
        return folder if is_sweep(folder) else None

    def record(self, name: str) -> dict[str, Any]:
        """Read a JSON file."""
        return durable.read_json(self.path / name)

    def config(self) -> dict[str, Any]:
        """Read the resolved config."""
        content = _yaml(self.path / self.CONFIG)
        return content if isinstance(content, dict) else {}

    def word(self, key: str) -> str | None:
        """Read a setting that is a word, such as `name` or `checkpoint.best`; None without one.

        All of config.yaml takes 3 ms to read, which is too much of hundreds of runs.
        """
        *section, name = key.split(".")
        pattern = rf"^{name}: (?!null$)'?([\w.-]+)'?$"
        if section:
            # The lines of a section are indented.
            pattern = rf"^{section[0]}:\n(?: .*\n)*?  {pattern.removeprefix('^')}"
        text, path = "", self.path / self.CONFIG
        with suppress(OSError, ValueError):
            # A pipe would never end.
            if path.is_file():
                with path.open(encoding="utf-8") as file:
                    text = file.read(_MOST_CHARACTERS)
        found = re.search(pattern, text, re.MULTILINE)
        return None if found is None else found[1]

    @property
    def overrides_file(self) -> Path:
        """Where the overrides of the latest start are; those of the first stay beside them."""
        resumed = self.path / self.RESUMED / self.OVERRIDES
        # A process that was killed while Hydra wrote this file left it empty; none is `[]`.
        if resumed.is_file() and resumed.stat().st_size:
            return resumed
        return self.path / self.HYDRA / self.OVERRIDES

    def typed(self, *, first: bool = False) -> list[str]:
        """Read the overrides of the latest start, or of the first."""
        file, content = self.path / self.HYDRA / self.OVERRIDES, None
        with suppress(OSError):
            content = _yaml(file if first else self.overrides_file)
        if not isinstance(content, list):
            return []
        return [str(each).lstrip("+") for each in content]

    def started_in(self) -> Path | None:
        """Read the folder in which its latest start was typed; None where Hydra noted none."""
        found: Any = _yaml(self.overrides_file.with_name("hydra.yaml"))
        for name in ("hydra", "runtime", "cwd"):
            # A stranger may have written the file.
            found = found.get(name) if isinstance(found, dict) else None
        return Path(found) if isinstance(found, str) else None

    def status(self) -> dict[str, Any]:
        """Read what the run is doing, or how it ended.

        A run whose process was killed could not say so: it counts as failed once nobody uses it.
        """
        content = self.record(self.STATUS)
        if content.get("state") == "running" and not is_locked(self.path):
            content |= {"state": "failed", "reason": "its process was killed"}
        return content

    def write_status(
        self, state: RunState, step: int, exit_code: int | None = None, reason: str | None = None
    ) -> None:
        """Say what a run is doing, or how and in one line, without secrets, why it ended.

        While it is running, `step` is that of its newest checkpoint or evaluation.
        """
        content = {"state": state, "exit_code": exit_code, "step": step, "reason": reason}
        with _status_lock:
            durable.write_record(self.path / self.STATUS, {**content, "time": time.time()})

    def refresh_status(self, place: RankPosition) -> None:
        """Say where a run is that goes on, and when its last step ended."""
        with _status_lock:
            content = self.record(self.STATUS)
            if content.get("state") == "running":
                content |= {"time": time.time(), "at": str(place)}
                if place.step:
                    content["last_step_time"] = place.step_since
                durable.write_record(self.path / self.STATUS, content)

    def last_step(self) -> int:
        """Read the last step as the status has it; 0 where it has none."""
        step = self.status().get("step")
        return step if isinstance(step, int) else 0

    def record_start(self) -> None:
        """Record once when the run begins; file times of a copy are those of the copying."""
        path = self.path / self.START
        if not path.exists():
            durable.make_folders(path.parent)
            durable.write_json(path, {"started": time.time()})

    def began(self) -> float:
        """Read when it began, in seconds since the epoch; 0 where nobody wrote it down."""
        found = self.record(self.START).get("started")
        return float(found) if isinstance(found, int | float) else 0.0

    def by_start(self) -> tuple[float, str]:
        """Give what runs are sorted by: when they began, then their path."""
        return self.began(), str(self.path)

    def checkpoint(self, step: int) -> Path:
        """Name the folder of a step's checkpoint."""
        return self.path / self.CHECKPOINTS / checkpoint_name(step)

    def steps(self) -> list[int]:
        """List the steps of the checkpoints, intact or not, ascending."""
        found = list[int]()
        for path in self.path.glob(f"{self.CHECKPOINTS}/*/{self.MANIFEST}"):
            if (step := step_of(path.parent)) is not None:
                found.append(step)
        return sorted(found)

    def terms(self) -> dict[str, Any]:
        """Read what the steps of the run depend on, as the newest checkpoint has it."""
        for step in reversed(self.steps()):
            found: Any = durable.read_json(self.checkpoint(step) / self.MANIFEST)
            for name in ("parts", "terms", "state"):
                # A stranger may have written the file.
                if not isinstance(found, dict):
                    break
                found = found.get(name)
            if isinstance(found, dict):
                return found
        return {}

    def rank_log(self, command: str, rank: int) -> Path | None:
        """Name the file of what a rank prints; None is the screen, which is the first one's."""
        if rank == 0:
            return None
        name = f"rank{rank}.log"
        # Commands that only read a run do not write over what its training printed.
        if command != "train":
            name = f"{command}-{name}"
        return self.path / "ranks" / name

    def host_log(self, host: str) -> Path:
        """Name the file of what is logged on a host, of a run that a launcher started."""
        return self.path / f"train.{host}.log"

    def traceback(self, rank: int) -> Path:
        """Name the file with the traceback and the stacks of a rank that failed."""
        return self.path / self.ERRORS / f"rank{rank}.txt"


def is_training(run: RunFolder) -> bool:
    """Whether a run trains, as far as one knows; not so what `train plan` and `verify` leave."""
    return run.word("command") in (None, "train")


def is_sweep(folder: Path) -> bool:
    """Whether a folder is one of a sweep, with a folder for each job."""
    files = [folder / name for name in SWEEP_FILES]
    return folder.parent.parent.name == "multirun" or any(map(os.path.isfile, files))


def all_runs(outputs: Path) -> Iterator[RunFolder]:
    """Find every run below `outputs`, the jobs of sweeps among them.

    A link below it that leads back to it, or below it, is not followed: that is found there.
    """
    home, folders = Path(os.path.realpath(outputs)), _folders_in(outputs)
    for _ in range(_DEPTH):
        inner = list[Path]()
        for folder in folders:
            if folder.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(home):
                continue
            if (run := RunFolder(folder)).is_run:
                yield run
            else:
                inner += _folders_in(folder)
        folders = inner


def _folders_in(folder: Path) -> list[Path]:
    found = list[Path]()
    with suppress(OSError):
        for entry in os.scandir(folder):
            # Of the entry it raises for a link to itself.
            if not entry.name.startswith(".") and os.path.isdir(entry):  # noqa: PTH112
                found.append(folder / entry.name)
    return found


def runs_below(outputs: Path) -> Iterator[RunFolder]:
    """Find the single runs below `outputs`; no job of a sweep."""
    for run in all_runs(outputs):
        if run.sweep is None:
            yield run


def runs_in(folder: Path) -> list[Path]:
    """List the run that a folder is, or those of its jobs, in their order."""
    if RunFolder(folder).is_run:
        return [folder]
    jobs = [path for path in _folders_in(folder) if RunFolder(path).is_run]
    # By number, so that job 10 comes behind job 9: a longer number is a larger one.
    return sorted(jobs, key=lambda path: (len(path.name.partition("_")[0]), path.name))


def _yaml(path: Path) -> Any:  # noqa: ANN401 - any YAML
    with suppress(*UNREADABLE):
        # A pipe would never end.
        if path.is_file():
            return durable.read_yaml(path)
    return None


class RunInUseError(TrainError):
    """Another process has this run in use; like a run that is not there, it cannot be resumed."""

    exit_code = 4


@contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep a run folder to this process, and clear away what an earlier crash left unfinished.

    Within this process it may be held again: the command line holds a run whose records it
    changes, and then the command does. `RunInUseError` names another process that holds it.
    """
    home = run.resolve()
    if home in _handles:
        yield
        return
    path = run / RunFolder.LOCK
    with durable.as_save_error(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    _handles[home] = handle
    try:
        with durable.as_save_error(path):
            _lock(handle, run)
        # On a full disk the lock works without a name in it.
        with suppress(OSError):
            os.ftruncate(handle, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            os.write(handle, json.dumps(holder).encode())
        durable.clean(run)
        durable.clean(run / RunFolder.CHECKPOINTS)
        yield
    finally:
        _handles.pop(home, None)
        # Some file systems know no locks; closing lets go of them anyway.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def is_locked(run: Path) -> bool:
    """Tell whether a process, on this machine or another that sees the lock, uses a run."""
    try:
        # A pipe of that name would never open.
        handle = os.open(run / RunFolder.LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


def _lock(handle: int, run: Path) -> None:
    """Take the lock, or wait half a second: the last child of a killed process may have it."""
    ends = time.monotonic() + 0.5
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > ends:
                remedy = "wait for it, stop it, or start another run"
                raise RunInUseError(f"{run}: in use by {lock_holder(run)}: {remedy}") from error
        time.sleep(0.01)


def lock_holder(run: Path) -> str:
    """Name the process that has a run in use, as it wrote it down."""
    # A stranger may have written it.
    with suppress(ValueError, KeyError, TypeError):
        found = durable.read_json(run / RunFolder.LOCK)
        return f"process {int(found['pid'])} on {str(found['host'])!r:.80}"
    return "another process"


def _close_in_child() -> None:
    # A loader's worker that outlives its parent must not keep the run.
    for handle in _handles.values():
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_in_child)
