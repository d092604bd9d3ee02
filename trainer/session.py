"""One process's part in a run: the device, the ranks, the lock, the signals, and how it ended."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from trainer.board import Board
from trainer.checkpoint.lock import hold
from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.plan import plan_run
from trainer.commands.train import train_run
from trainer.commands.verify import verify_run
from trainer.config import RunConfig, to_plain
from trainer.errors import ConfigError, DoesNotFitError, RankLostError
from trainer.membership import Membership, is_loss
from trainer.out_of_memory import is_out_of_memory
from trainer.phases import PhaseTimes, clock_of
from trainer.record import recorded
from trainer.schema.rules import NO_GPU
from trainer.signals import StopFlag
from trainer.world import PATIENCE, World

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


def choose_device(config: RunConfig, local_rank: int = 0) -> torch.device:
    """Resolve `device`.

    Raises:
        ConfigError: `device=cuda` without a GPU for this rank.
    """
    found = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and not found:
        if config.command == "plan" and config.accum.params.get("memory", True):
            # A plan for a machine that is not here computes nothing: shapes run fake.
            return torch.device("cpu")
        raise ConfigError(NO_GPU)
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


def run_session(
    config: RunConfig, folder: Path, stop: StopFlag, member: Membership | None = None
) -> int:
    """Run one command in this process, alone or as one of several ranks.

    Holds the run folder, and leaves in `status.json` how it ended; with several ranks the first
    does.

    Args:
        config: composed and valid.
        folder: the run folder; it exists on the first rank.
        stop: whether a signal asked to stop at the next step boundary.
        member: this process's place among the ranks; None is alone.

    Returns:
        The process's exit code.

    Raises:
        TrainError: how the run ended, where it did not end well; its exit code is in status.json.
            A `RankLostError` names the step and phase at which this rank lost another.
    """
    settle_bits(config)
    if member is not None:
        with joined(config, member) as world, _losses_told(world):
            folder = _agreed(config, folder, world)
            if config.command in READING:
                return run_rank(config, folder, world, stop)
            return _recorded(config, folder, world, stop)
    size = local_ranks(config) if config.command in IMAGINING else 1
    device = choose_device(config)
    times = PhaseTimes(clock_of(device))
    nodes = config.parallel.nodes if config.command in IMAGINING else 1
    world = World(size=size * nodes, local_size=size, device=device, times=times)
    if config.command in READING:
        return run_rank(config, folder, world, stop)
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
    store = _store(member)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=member.meeting if store is None else None,
        store=store,
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
        board=Board(member.board),
        times=PhaseTimes(clock_of(device)),
    )
    try:
        yield world
        # What still refers to the groups aborts the process when they are gone.
        gc.collect()
        world.barrier()
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _store(member: Membership) -> Store | None:
    """Open what the ranks of our own supervisors find each other by, and wait for all of them.

    Nobody is late before all are there: `parallel.timeout_s` counts from then on.
    """
    kind, _, place = member.meeting.partition("://")
    if kind == "file":
        store: Store = FileStore(place, member.size)
    elif kind == "tcp":
        host, _, port = place.rpartition(":")
        store = TCPStore(
            host.strip("[]"),
            int(port),
            member.size,
            is_master=member.rank == 0,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=member.listener,
        )
    else:
        return None
    store.set(f"here/{member.rank}", "")
    store.wait([f"here/{rank}" for rank in range(member.size)], PATIENCE)
    return store


def run_rank(config: RunConfig, folder: Path, world: World, stop: StopFlag) -> int:
    """Run the command as one rank whose start and end are recorded elsewhere.

    Raises:
        DoesNotFitError: memory ran out where no smaller micro-batch helps.
        RuntimeError: something else failed.
    """
    try:
        return COMMANDS[config.command](config.settled(world.size), folder, world, stop)
    except Exception as error:
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
        held.enter_context(_losses_told(world))
        return run_rank(config, folder, world, stop)


@contextmanager
def _losses_told(world: World) -> Iterator[None]:
    """Say in one line that another rank is gone, where no supervisor of ours does.

    Raises:
        RankLostError: a collective failed since another rank is gone, or does not come.
        RuntimeError: as raised inside, where it is anything else.
    """
    try:
        yield
    except RuntimeError as error:
        if world.board is None or not is_loss(error):
            raise
        text = " ".join(str(error).split())
        raise RankLostError(
            f"rank {world.rank} lost another rank at {world.board.read()}: {text:.200}"
        ) from error


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
