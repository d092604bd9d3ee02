"""Starts a run: the device, the lock, the signals, and the end in status.json."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

import torch

from trainer.checkpoint.lock import hold
from trainer.checkpoint.status import Status, write_status
from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.plan import plan_run
from trainer.commands.train import train_run
from trainer.commands.verify import verify_run
from trainer.config import RunConfig
from trainer.errors import ConfigError, DoesNotFitError, Preempted, TrainError
from trainer.out_of_memory import is_out_of_memory
from trainer.report import journal
from trainer.report.metrics import METRICS_FILE
from trainer.world import World

COMMANDS = {
    "train": train_run,
    "plan": plan_run,
    "verify": verify_run,
    "evaluate": evaluate_run,
    "export": export_run,
}

READING = ("evaluate", "export")
"""Commands that read another run and leave its status alone."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@final
@dataclass
class StopFlag:
    """Whether a signal asked the run to stop at the next step boundary."""

    is_set: bool = False

    def __call__(self) -> bool:
        """Ask it."""
        return self.is_set


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Let the first SIGINT, SIGTERM or SIGUSR1 set a flag, and the second one end the process.

    Yields:
        The flag.
    """
    flag = StopFlag()

    def on_signal(number: int, frame: FrameType | None) -> None:
        flag.is_set = True
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, on_signal) for each in SIGNALS}
    try:
        yield flag
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def choose_device(config: RunConfig) -> torch.device:
    """Resolve `device`.

    Raises:
        ConfigError: `device=cuda` without a GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU is usable here; use device=cpu or device=auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", 0)


def run(config: RunConfig, folder: Path) -> int:
    """Run one command to its end.

    Holds the run folder, turns signals into a stop at the next step boundary, and leaves in
    `status.json` how it ended.

    Args:
        config: composed and valid.
        folder: the run folder; it exists.

    Returns:
        The process's exit code.

    Raises:
        TrainError: how the run ended, where it did not end well; its exit code is in status.json.
    """
    device = choose_device(config)
    world = World(device=device)
    if config.deterministic is True:
        torch.use_deterministic_algorithms(mode=True)
    command = COMMANDS[config.command]
    if config.command in READING:
        return command(config.settled(world.size), folder, world, StopFlag())
    with hold(folder), stop_signals() as stop:
        write_status(folder, Status(state="running"))
        try:
            code = command(config.settled(world.size), folder, world, stop)
        except BaseException as error:
            write_status(folder, _ending(error, folder))
            raise
        write_status(folder, Status(state="completed", exit_code=code, step=_last_step(folder)))
        return code


def _ending(error: BaseException, folder: Path) -> Status:
    code = error.exit_code if isinstance(error, TrainError) else 1
    reason = str(error) or type(error).__name__
    if is_out_of_memory(error):
        code = DoesNotFitError.exit_code
    return Status(
        state="preempted" if isinstance(error, Preempted) else "failed",
        exit_code=code,
        step=_last_step(folder),
        reason=reason.splitlines()[0],
    )


def _last_step(folder: Path) -> int:
    """Read the last step from metrics.jsonl, the truth about a run."""
    return max((entry["step"] for entry in journal.read(folder / METRICS_FILE)), default=0)
