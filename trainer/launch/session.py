"""One process's part in a run: the device, the ranks, the lock, the signals, and how it ended."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from trainer.checkpoint.lock import hold
from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.plan import plan_run
from trainer.commands.train import train_run
from trainer.commands.verify import verify_run
from trainer.config.keys import digests
from trainer.config.rules import NO_GPU
from trainer.config.run_config import RunConfig, to_plain
from trainer.core import durable
from trainer.core.errors import ConfigError, DoesNotFitError, RankLostError, TrainError
from trainer.core.launcher import MEETING, Membership, is_loss
from trainer.core.launcher import PATIENCE as MEETING_PATIENCE
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.phases import PhaseTimes, clock_of
from trainer.core.rank_progress import Board
from trainer.core.signals import StopFlag, check
from trainer.core.world import PATIENCE, World
from trainer.data.samples import described
from trainer.report.environment import num_cores
from trainer.report.run_status import drop_empty, recorded

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

MEETING_POLL_S = 0.2

MEETING_CONNECT_S = 10.0
"""How long one attempt to connect may take."""

MEETING_ANSWER_S = 60.0
"""How long what answers where the ranks meet may take to show that it is their store."""


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


def run_session(config: RunConfig, folder: Path, stop: StopFlag) -> int:
    """Run one command in this process alone.

    Holds the run folder, and leaves in `status.json` how it ended.

    Args:
        config: composed and valid.
        folder: the run folder; it exists.
        stop: whether a signal asked to stop at the next step boundary.

    Returns:
        The process's exit code.

    Raises:
        TrainError: how the run ended, where it did not end well; its exit code is in status.json.
    """
    settle_bits(config)
    size = local_ranks(config) if config.command in IMAGINING else 1
    device = choose_device(config)
    times = PhaseTimes(clock_of(device))
    nodes = config.parallel.nodes if config.command in IMAGINING else 1
    world = World(size=size * nodes, local_size=size, device=device, times=times)
    if config.command in READING:
        return run_rank(config, folder, world, stop)
    with hold(folder), recorded(folder):
        return run_rank(config, folder, world, stop)


@contextmanager
def joined(config: RunConfig, member: Membership) -> Iterator[World]:
    """Meet the other ranks, and part from them in good order.

    Yields:
        All ranks.
    """
    device = choose_device(config, member.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    board = Board(member.board)
    with board.waiting():
        patient = _meet(member, device, config.parallel.timeout_s)
    world = World(
        rank=member.rank,
        size=member.size,
        local_size=member.local_size,
        device=device,
        patient=patient,
        board=board,
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


def _meet(member: Membership, device: torch.device, timeout_s: float) -> dist.ProcessGroup | None:
    """Wait for all ranks.

    Returns:
        The group of all ranks for what one of them does alone.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_store(member),
        rank=member.rank,
        world_size=member.size,
        timeout=timedelta(seconds=timeout_s),
    )
    patient: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=PATIENCE)
    return patient


def _store(member: Membership) -> Store:
    """Open what the ranks find each other by, and wait for all of them.

    Nobody is late before all are there: `parallel.timeout_s` counts from then on.

    Raises:
        ConfigError: the first rank cannot listen where the ranks are to meet.
        RankLostError: a rank did not come.
    """
    kind, _, place = member.meeting.partition("://")
    patience_s = member.patience_s
    limit = float("inf") if patience_s is None else time.monotonic() + patience_s
    store = FileStore(place, member.size) if kind == "file" else _served(member, place, limit)
    if patience_s is None:
        store.set(f"here/{member.rank}", "")
        store.wait([f"here/{rank}" for rank in range(member.size)], PATIENCE)
        return store
    store = PrefixStore(f"train/{member.attempt}", store)
    store.set(f"here/{member.rank}", "")
    # Counted, so that many ranks ask little of the store; and in Python, which hears signals.
    store.add("count", 1)
    while store.add("count", 0) < member.size:
        if time.monotonic() > limit:
            late = [rank for rank in range(member.size) if not store.check([f"here/{rank}"])]
            raise RankLostError(
                f"rank{'s' if late[1:] else ''} {', '.join(map(str, late))} did not come to "
                f"{place} within {patience_s:g} s ({MEETING_PATIENCE})"
            )
        check()
        time.sleep(MEETING_POLL_S)
    return store


def _served(member: Membership, place: str, limit: float) -> Store:
    """Serve the store, or connect to it once it is there.

    Args:
        member: this rank.
        place: host and port.
        limit: until when to try, by the monotonic clock.

    Raises:
        ConfigError: the first rank cannot listen there.
        RankLostError: nothing answers there.
        RuntimeError: the store failed for another reason.
    """
    host, _, port = place.rpartition(":")
    address = host.strip("[]"), int(port)
    serves = member.rank == 0 and not member.is_hosted
    # PyTorch's own attempts to connect fill the screen.
    while not serves and member.patience_s is not None:
        try:
            socket.create_connection(address, timeout=MEETING_CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > limit:
                lost = RankLostError(
                    f"rank {member.rank}: rank 0 does not answer at {place} within "
                    f"{member.patience_s:g} s ({MEETING_PATIENCE}): {error}"
                )
                lost.is_own = True
                raise lost from error
        check()
        time.sleep(MEETING_POLL_S)
    if not serves and member.patience_s is not None:
        return _reached(member, address, min(limit, time.monotonic() + MEETING_ANSWER_S))
    try:
        store = TCPStore(
            *address,
            member.size,
            is_master=serves,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=member.listener,
        )
    except RuntimeError as error:
        if not serves or not is_loss(error):
            raise
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(
            f"MASTER_PORT={port}: rank 0 cannot listen there: {reason:.150}"
        ) from error
    return store


def _reached(member: Membership, address: tuple[str, int], limit: float) -> Store:
    """Connect to the store, in a thread: another server there may never say a word.

    Args:
        member: this rank.
        address: host and port.
        limit: until when to try, by the monotonic clock.

    Raises:
        RankLostError: what answers there is no store.
    """
    # A thread that comes back while the process ends would abort it, so it gives up well before.
    left = timedelta(seconds=max(1.0, (limit - time.monotonic()) / 2))
    found: list[Store] = []
    why = ["it never says what it is"]

    def connect() -> None:
        try:
            found.append(
                TCPStore(
                    *address, member.size, is_master=False, timeout=left, wait_for_workers=False
                )
            )
        except RuntimeError as error:
            why.append(" ".join(str(error).split()))

    thread = threading.Thread(target=connect, daemon=True)
    with _silenced():
        thread.start()
        while thread.is_alive() and time.monotonic() < limit:
            check()
            thread.join(MEETING_POLL_S)
    if not found:
        lost = RankLostError(
            f"rank {member.rank}: something else than rank 0 answers at {address[0]}:{address[1]} "
            f"({MEETING}): {why[-1]:.150}"
        )
        lost.is_own = True
        raise lost
    found[0].set_timeout(PATIENCE)
    return found[0]


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop what libraries write to standard error meanwhile: PyTorch fills the screen with frames.

    Yields:
        Nothing.
    """
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def run_rank(config: RunConfig, folder: Path, world: World, stop: StopFlag) -> int:
    """Run the command as one rank whose start and end are recorded elsewhere.

    Raises:
        DoesNotFitError: memory ran out where no smaller micro-batch helps.
        TrainError: a class of the user's called `sys.exit`.
        RuntimeError: something else failed.
    """
    try:
        return COMMANDS[config.command](config.with_global_batch(world.size), folder, world, stop)
    except SystemExit as error:  # it would end the run as if it were done
        raise TrainError(f"{described(error)}: raise an error where a run cannot go on") from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise DoesNotFitError(f"out of memory outside of micro-batches: {text:.200}") from error


@contextmanager
def filed(log: Path | None) -> Iterator[None]:
    """Send what this process and those it starts print to a file, as a supervisor of ours does.

    What is said of its end still goes where the launcher wants it.

    Args:
        log: None is the screen.

    Yields:
        Nothing.
    """
    if log is None:
        yield
        return
    streams = (sys.stdout, sys.stderr)
    durable.make_folders(log.parent)
    before = [os.dup(number) for number in (1, 2)]
    try:
        with log.open("ab") as file:
            _point(streams, [file.fileno()] * 2)
        yield
    finally:
        _point(streams, before)
        for handle in before:
            os.close(handle)
        drop_empty(log)


def _point(streams: Iterable[TextIO], handles: Iterable[int]) -> None:
    """Let standard output and standard error lead elsewhere from now on."""
    for stream in streams:
        stream.flush()
    for number, handle in enumerate(handles, 1):
        os.dup2(handle, number)


@contextmanager
def losses_told(rank: int) -> Iterator[None]:
    """Say in one line that ranks did not meet, or lost each other before or after the run.

    Args:
        rank: this one.

    Yields:
        Nothing.

    Raises:
        RankLostError: a collective failed since another rank is gone, or does not come.
        RuntimeError: as raised inside, where it is anything else.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_loss(error):
            raise
        text = " ".join(str(error).split())
        lost = RankLostError(f"rank {rank} lost another rank outside of the run: {text:.200}")
        # The first rank says it too, unless it is what was lost.
        lost.is_own = rank == 1
        raise lost from error


def agreed(config: RunConfig, folder: Path, world: World) -> Path:
    """Take the first rank's folder, and make sure that every rank was given the same config.

    Raises:
        ConfigError: the ranks differ; the line names the keys.
    """
    told = {"folder": str(folder), "config": digests(to_plain(config))}
    answers: list[dict[str, Any]] = world.collect(told)
    first = answers[0]["config"]
    for rank, answer in enumerate(answers):
        own = answer["config"]
        differing = sorted(k for k in own.keys() | first.keys() if own.get(k) != first.get(k))
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
        torch.set_num_threads(max(1, num_cores() // num_ranks))
