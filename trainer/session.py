"""One process's part in a run: the device, the ranks, the lock, the signals, and how it ended."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist

from trainer.board import Board
from trainer.checkpoint.lock import hold
from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.plan import plan_run
from trainer.commands.train import train_run
from trainer.commands.verify import verify_run
from trainer.config import RunConfig, to_plain
from trainer.errors import ConfigError, DoesNotFitError
from trainer.membership import Membership
from trainer.out_of_memory import is_out_of_memory
from trainer.record import recorded
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

IMAGINING = ("plan", "verify")
"""Commands that work out in one process what several ranks would do."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

PATIENCE = timedelta(hours=2)
"""How long ranks wait while one of them tunes, or writes a checkpoint. If it dies, they know."""


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

    Only the main thread hears signals; elsewhere the flag stays as it is.

    Yields:
        The flag.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

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


def choose_device(config: RunConfig, local_rank: int = 0) -> torch.device:
    """Resolve `device`.

    Raises:
        ConfigError: `device=cuda` without a GPU for this rank.
    """
    found = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and not found:
        if config.command == "plan" and config.accum.params.get("memory"):
            # A plan for a machine that is not here computes nothing: shapes run fake.
            return torch.device("cpu")
        raise ConfigError(
            "device=cuda: no GPU is usable here; use device=cpu or device=auto, or plan for one "
            "that is not here: train plan device=cuda accum.memory=80GiB"
        )
    if not found:
        return torch.device("cpu")
    if local_rank >= found:
        raise ConfigError(
            f"parallel.ranks: rank {local_rank} of this machine has no GPU of its own; the largest "
            f"valid value is {found}"
        )
    return torch.device("cuda", local_rank)


def local_ranks(config: RunConfig) -> int:
    """Resolve `parallel.ranks` on this machine: one per GPU, else one."""
    if config.parallel.ranks != "auto":
        return config.parallel.ranks
    is_single = config.device == "cpu" or config.parallel.mode == "none"
    return 1 if is_single else max(1, torch.cuda.device_count())


def run_session(config: RunConfig, folder: Path, member: Membership | None = None) -> int:
    """Run one command in this process, alone or as one of several ranks.

    Holds the run folder, turns signals into a stop at the next step boundary, and leaves in
    `status.json` how it ended; with several ranks the first does.

    Args:
        config: composed and valid.
        folder: the run folder; it exists on the first rank.
        member: this process's place among the ranks; None is alone.

    Returns:
        The process's exit code.

    Raises:
        TrainError: how the run ended, where it did not end well; its exit code is in status.json.
    """
    settle_bits(config)
    if member is not None:
        with stop_signals() as stop, joined(config, member) as world:
            return _recorded(config, _agreed(config, folder, world), world, stop)
    size = local_ranks(config) if config.command in IMAGINING else 1
    world = World(size=size, local_size=size, device=choose_device(config))
    if config.command in READING:
        return run_rank(config, folder, world, StopFlag())
    with stop_signals() as stop:
        return _recorded(config, folder, world, stop)


@contextmanager
def joined(config: RunConfig, member: Membership) -> Iterator[World]:
    """Meet the other ranks, and part from them in good order.

    Yields:
        All ranks.
    """
    device = choose_device(config, member.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=member.meeting,
        rank=member.rank,
        world_size=member.size,
        timeout=timedelta(seconds=config.parallel.timeout_s),
    )
    world = World(
        rank=member.rank,
        size=member.size,
        local_size=member.local_size,
        device=device,
        patient=dist.new_group(backend="gloo", timeout=PATIENCE),
        board=None if member.board is None else Board(member.board),
    )
    try:
        yield world
        # What still refers to the groups aborts the process when they are gone.
        gc.collect()
        world.barrier()
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def run_rank(config: RunConfig, folder: Path, world: World, stop: StopFlag) -> int:
    """Run the command as one rank whose start and end are recorded elsewhere.

    Raises:
        DoesNotFitError: memory ran out where no smaller micro-batch helps.
        RuntimeError: something else failed.
    """
    try:
        return COMMANDS[config.command](config.settled(world.size), folder, world, stop)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise DoesNotFitError(f"out of memory outside of micro-batches: {text:.200}") from error


def _recorded(config: RunConfig, folder: Path, world: World, stop: StopFlag) -> int:
    """Run the command, and record in the run folder how it goes."""
    imagined = config.command in IMAGINING
    told = World() if imagined else world
    with ExitStack() as held:
        told.on_main(lambda: held.enter_context(hold(folder)))
        if told.is_main:
            held.enter_context(recorded(folder))
        return run_rank(config, folder, world, stop)


def _agreed(config: RunConfig, folder: Path, world: World) -> Path:
    """Take the first rank's folder, and make sure that every rank was given the same config.

    Raises:
        ConfigError: the ranks differ; the line names the keys.
    """
    plain = to_plain(config)
    digest = {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        for key, value in plain.items()
    }
    answers: list[dict[str, Any]] = world.collect({"folder": str(folder), "config": digest})
    for rank, answer in enumerate(answers):
        differing = [
            key for key in digest if answer["config"].get(key) != answers[0]["config"][key]
        ]
        if differing:
            raise ConfigError(
                f"{', '.join(differing)}: rank {rank} was given another value than rank 0; type "
                "the same command on every node"
            )
    return Path(answers[0]["folder"])


def settle_bits(config: RunConfig) -> None:
    """Make kernels deterministic, where asked for; several threads may sum in another order."""
    if config.deterministic is not False:
        torch.use_deterministic_algorithms(mode=True)
    if config.deterministic == "layout":
        torch.set_num_threads(1)


def share_cores(num_ranks: int) -> None:
    """Give each local rank its share of the cores, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
