"""Whole runs in this process: composed once, run in a fraction of a second, compared bit for bit.

`Lab.run` is what the command line starts, from the lock to status.json; only typing is left out.
An outcome is the newest checkpoint, tensor by tensor, with everything else that the run left to
posterity: random states, cursor, metrics and the ledger of samples.
"""

import contextlib
import copy
import functools
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reliability import toys
from trainer.checkpoint.store import CheckpointStore
from trainer.cli.compose import Composer
from trainer.cli.prepare import prepare_run
from trainer.config.run_config import RunConfig
from trainer.core.errors import TrainError
from trainer.launch import session
from trainer.launch import start as launch
from trainer.report import journal

assert session  # the first run would import it, and imports draw random numbers

BASE = (
    "model._target_=tests.reliability.toys.Net",
    "data._target_=tests.reliability.toys.Rows",
    "hooks=[tests.reliability.toys.Watch]",
    "batch.global=8",
    "accum=fixed",
    "accum.micro=3",
    "steps=7",
    "checkpoint.every=2",
    "eval.every=3",
    "log.samples=true",
    "wandb.mode=disabled",
    "device=cpu",
    "precision=fp32",
    "name=lab",
)
"""A run over 2.3 epochs of 23 ragged rows: three steps an epoch, the last one short."""

RAISED = 70
"""Exit code of a forked process whose work raised what ends no run in good order."""

UNTIMED = ("seconds", "tokens_per_second", "model_flops_per_second", "memory_bytes", "eval_seconds")


def lines(*more: str) -> tuple[str, ...]:
    """Put settings over those of `BASE`; an option of a group over the group's."""
    keys = {line.partition("=")[0] for line in more}
    keys |= {"accum", "accum.micro"} if "accum._target_" in keys else set()
    own = {line.partition("=")[0]: line for line in BASE}
    left = [line for key, line in own.items() if not keys & {key, key.partition("._target_")[0]}]
    return (*left, *more)


@functools.cache
def config(*more: str) -> RunConfig:
    """Compose and check a run as the command line does."""
    return prepare_run(lines(*more), Composer()).config


def with_faults(settings: RunConfig, *faults: str) -> RunConfig:
    """Give a config other faults in its rows."""
    params = {**settings.data.params, "faults": list(faults)}
    data = settings.data.model_copy(update={"params": params})
    return settings.model_copy(update={"data": data})


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, the error if any, and what it said."""

    code: int
    error: str = ""
    screen: str = ""


def run(
    settings: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    after_step: Callable[[int], None] | None = None,
) -> Ended:
    """Run a config to its end in this process; going on begins with other random states."""
    folder.mkdir(parents=True, exist_ok=True)
    if resume:
        settings = settings.model_copy(update={"resume": str(folder)})
    seed_everything(int(resume))
    toys.after_step = after_step
    screen = io.StringIO()
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            code = launch.run(settings, folder)
        return Ended(code, screen=screen.getvalue())
    except TrainError as error:
        return Ended(error.exit_code, str(error), screen.getvalue())
    finally:
        toys.after_step = None


def go_on(settings: RunConfig, folder: Path, **how: Any) -> Ended:
    """Do what `resume=auto` does: go on if there is a checkpoint, start afresh if there is none."""
    has_saved = bool(CheckpointStore(folder / "checkpoints").steps())
    return run(settings, folder, resume=has_saved, **how)


def stop_at(*steps: int) -> Callable[[int], None]:
    """Send SIGTERM to this process at the end of some steps."""
    return lambda step: os.kill(os.getpid(), signal.SIGTERM) if step in steps else None


def seed_everything(seed: int) -> None:
    """Begin where every new process is to begin; a real one's generators differ unused."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def outcome(folder: Path, *, step: int | None = None, rng: bool = True) -> dict[str, Any]:
    """Read what a run left: every tensor's bytes, its other state, its metrics, its ledger.

    Without `rng` random states do not count; a real process begins with others, and uses none.
    """
    loaded = CheckpointStore(folder / "checkpoints").load(step, set_aside=False)
    assert not loaded.messages
    parts = copy.deepcopy({k: v for k, v in loaded.parts.items() if k != "rng"})
    del parts["terms"]["state"]["environment"]
    found: dict[str, Any] = {
        name: bits(loaded.tensors[name][...])
        for name in loaded.tensors
        if rng or not name.startswith("rng.")
    }
    found |= {"step": loaded.step, "parts": json.dumps(parts)}
    return found | ({"rng": json.dumps(loaded.parts["rng"])} if rng else {}) | logged(folder)


def logged(folder: Path) -> dict[str, Any]:
    """Read the metrics, without times, and the ledger."""
    metrics = [
        {name: value for name, value in entry.items() if name not in UNTIMED}
        for entry in journal.read(folder / "metrics.jsonl")
    ]
    return {"metrics": metrics, "ledger": journal.read(folder / "samples.jsonl")}


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Give what makes two tensors equal bit for bit, NaN included."""
    plain = tensor.detach().contiguous()
    whole = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), whole


def difference(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Name what differs between two outcomes."""
    return sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))


def status(folder: Path) -> dict[str, Any]:
    """Read status.json."""
    content: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return content


@dataclass
class Child:
    """A forked process: torch is imported already, so that a kill costs milliseconds."""

    pid: int

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; fine if it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for its end: the exit code, or minus the signal that killed it."""
        _, ended = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(ended)

    def has_ended(self) -> bool:
        """Whether it ended, without collecting it."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None


def fork(work: Callable[[], int], log: Path | None = None) -> Child:
    """Do some work in a child process, which ends with its result."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid)
    code = RAISED
    try:
        target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(target, 1)
        os.dup2(target, 2)
        code = work()
    except BaseException as error:  # the child may not return into the test
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


@contextlib.contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Measure seconds since the block began."""
    started = time.perf_counter()
    yield lambda: time.perf_counter() - started


def assert_same(found: dict[str, Any], expected: dict[str, Any], about: str) -> None:
    """Compare two outcomes, tolerance 0."""
    different = difference(found, expected)
    assert not different, f"{about}: {', '.join(different)}"
