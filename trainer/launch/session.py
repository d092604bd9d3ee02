"""Set up one process's part in a run, its device and its way to the other ranks; run the command.

Commands are run here and nowhere else, whether this process is alone or one of several ranks.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from trainer.commands import function_of
from trainer.config.command_words import OF_OTHER_DATA, READING
from trainer.config.run_config import RunConfig
from trainer.core import gpu
from trainer.core.errors import ConfigError, DoesNotFitError, RankFailedError, TrainError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.rank_progress import FIRST_STEP, PhaseTimes, RankProgress
from trainer.core.run_folder import hold
from trainer.core.signals import StopFlag, check
from trainer.core.user_code import described
from trainer.core.world import LONG_TIMEOUT, World, groups_of
from trainer.launch.membership import START_TIMEOUT, Membership
from trainer.report.heartbeat import heartbeat
from trainer.report.records import num_cores
from trainer.report.run_status import recorded

_NOT_DETERMINISTIC = re.compile(r"(.{1,80}) does not have a deterministic implementation")
_POLL_S = 0.2
_CONNECT_S = 10.0  # that one attempt to connect may take


def choose_device(config: RunConfig, local_rank: int = 0) -> torch.device:
    """Resolve `device`; `ConfigError` where there is no GPU for this rank."""
    # Weights are exported in main memory, also where the run had a GPU and this machine has none.
    is_export, is_planned = config.command == "export", config.command == "plan"
    found = 0
    if config.device in {"auto", "cuda"} and not is_export:
        found = len(gpu.devices())
    if not found:
        # A plan for a machine that is not here computes nothing: shapes run fake.
        is_fake = is_planned and config.accum.params.get("memory", True)
        if config.device == "cuda" and not (is_fake or is_export):
            text = (
                "no GPU is usable here; use device=cpu or device=auto, or plan for one that is not "
                "here: train plan device=h100"
            )
            if is_planned:
                text = (
                    "no GPU is here, so its memory is not known; name a card to plan for, e.g. "
                    "device=h100, or type accum.memory=80GiB"
                )
            raise ConfigError(f"device=cuda: {text}")
        return torch.device("cpu")
    if local_rank >= found:
        raise ConfigError(
            f"parallel.ranks: no GPU for rank {local_rank} of this machine; use at most {found}"
        )
    return torch.device(gpu.DEVICE_TYPE, local_rank)


def gpu_index(member: Membership, visible: int) -> int:
    """Number the GPU of a rank among the visible ones; a launcher may show each rank its own."""
    return 0 if visible == 1 and not member.is_ours else member.local_rank


def local_ranks(config: RunConfig) -> int:
    """Resolve `parallel.ranks` on this machine: one per GPU, else one."""
    if config.parallel.ranks != "auto":
        return config.parallel.ranks
    if config.device not in {"auto", "cuda"} or config.parallel.mode == "none":
        return 1
    return max(1, len(gpu.devices()))


def run_single(config: RunConfig, folder: Path, stop: StopFlag) -> int:
    """Run one command in this process alone, with the run folder to itself; give the exit code."""
    size = 1
    # These work out in one process what several ranks would do.
    if config.command in ("plan", "verify"):
        size = local_ranks(config)
    world = replace(_prepare(config), size=size, local_size=size)
    if config.command in READING:
        return run_rank(config, folder, world, stop)
    with hold(folder), recorded(config, folder), heartbeat(config, folder, world.rank_progress):
        return run_rank(config, folder, world, stop)


@contextmanager
def joined_session(
    config: RunConfig, folder: Path, member: Membership, rank_progress: RankProgress
) -> Iterator[World]:
    """Set this rank up, wait for the others, and part from them in good order. Collective."""
    world = _prepare(config, gpu_index(member, len(gpu.devices())))
    if member.is_ours and config.deterministic != "layout" and "OMP_NUM_THREADS" not in os.environ:
        # A launcher gives each of its ranks a share of the cores; so do we.
        torch.set_num_threads(max(1, num_cores() // member.local_size))
    backend, device_id = "gloo", None
    if gpu.is_gpu(world.device):
        # NCCL reduces gradients, gloo what is counted on the host.
        backend, device_id = f"cpu:gloo,{gpu.DEVICE_TYPE}:nccl", world.device
    timeout = max(LONG_TIMEOUT, timedelta(seconds=FIRST_STEP * config.parallel.timeout_s))
    # Refreshed while the others are waited for, too.
    with heartbeat(config, folder, rank_progress, member.rank):
        with rank_progress.waiting():
            dist.init_process_group(
                backend,
                store=_open_store(member),
                rank=member.rank,
                world_size=member.size,
                timeout=timeout,
                device_id=device_id,
            )
            group = dist.new_group(backend="gloo", timeout=timeout)
            groups = groups_of(member.rank, member.size, timeout)
            # NCCL's communicator takes memory, so it is there before memory limits are read.
            dist.barrier()
        world = replace(
            world,
            rank=member.rank,
            size=member.size,
            local_size=member.local_size,
            long_timeout_group=group,
            groups=groups,
            rank_progress=rank_progress,
        )
        try:
            yield world
            # What still refers to the groups aborts the process when they are gone.
            gc.collect()
            world.barrier()
        finally:
            # Whatever it raises would hide how the command ended.
            with suppress(Exception):
                dist.destroy_process_group()


def run_rank(config: RunConfig, folder: Path, world: World, stop: StopFlag) -> int:
    """Run the command as one rank, recorded elsewhere, and give the exit code."""
    try:
        run = function_of(config.command)
        if config.command not in OF_OTHER_DATA:
            config = config.with_global_batch(world.size)
        return run(config, folder, world, stop)
    except SystemExit as error:  # it would end the run as if it were done
        raise TrainError(f"{described(error)}: do not exit the process in user code") from error
    except Exception as error:
        if (found := _NOT_DETERMINISTIC.match(str(error))) is not None:
            raise ConfigError(
                f"deterministic={str(config.deterministic).lower()}: {found[1]} has no "
                "deterministic kernel here; use another operator, or deterministic=false"
            ) from error
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise DoesNotFitError(f"out of memory outside of micro-batches: {text:.200}") from error


def _open_store(member: Membership) -> Store:
    """Open the store by which ranks find each other, and wait there for all. Collective."""
    # Ranks of our own find each other by a file, and wait until their supervisor ends them.
    if member.start_timeout_s is None:
        return FileStore(member.address, member.size)
    limit = time.monotonic() + member.start_timeout_s
    # A port may be used by two jobs by mistake.
    store = PrefixStore(f"train/{member.job}", _connect(member, limit))
    if member.rank == 0:
        store.set("attempt", uuid4().hex)
    attempt = ""
    while True:
        attempt = _join_attempt(store, member, attempt)
        if attempt and store.check([f"{attempt}/complete"]):
            return PrefixStore(attempt, store)
        if time.monotonic() > limit:
            raise RankFailedError(
                f"{_late_ranks(store, member.size, attempt)} did not connect to "
                f"{member.address} within {member.start_timeout_s:g} s ({START_TIMEOUT})"
            )
        check()
        time.sleep(_POLL_S)


def _late_ranks(store: Store, size: int, attempt: str) -> str:
    """Name the ranks that have not joined an attempt: `rank 3`, `ranks 1, 2`."""
    late = list[str]()
    if attempt:
        for rank in range(size):
            if not store.check([f"{attempt}/{rank}"]):
                late.append(str(rank))
    if len(late) > 1:
        return f"ranks {', '.join(late)}"
    # Where nobody else is late, the first rank did not open or close an attempt.
    return f"rank {''.join(late) or 0}"


def _join_attempt(store: Store, member: Membership, attempt: str) -> str:
    """Join the attempt that the first rank opened last, if that is not an earlier one; name it.

    A launcher's store outlives an attempt, and machines count restarts differently. So the first
    rank names each attempt anew, and closes it once all are there: a rank that comes to one that is
    complete waits for the next.
    """
    newest = ""
    # `get` alone would wait for the first rank.
    if store.check(["attempt"]):
        newest = store.get("attempt").decode()
    if newest != attempt and not store.check([f"{newest}/complete"]):
        store.set(f"{newest}/{member.rank}", "")
        attempt = newest
    # The first rank alone asks for all, so that many ranks ask little of the store.
    if member.rank == 0 and store.check([f"{attempt}/{rank}" for rank in range(member.size)]):
        store.set(f"{attempt}/complete", "")
    return attempt


def _connect(member: Membership, limit: float) -> Store:
    """Serve the store, or connect to it once it is there, until a moment of the monotonic clock."""
    host, _, written = member.address.rpartition(":")
    host, port = host.strip("[]"), int(written)
    is_server = member.rank == 0 and not member.is_hosted
    try:
        # PyTorch's own attempts to connect would fill the screen.
        while not is_server:
            check()
            try:
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
                break
            except OSError:
                if time.monotonic() > limit:
                    raise
            time.sleep(_POLL_S)
        wait = timedelta(seconds=member.start_timeout_s or 0)
        store = TCPStore(host, port, member.size, is_server, wait, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if is_server:
            text = f"MASTER_PORT={port}: rank 0 cannot listen there: {reason:.150}"
            raise ConfigError(text) from error
        raise RankFailedError(
            f"rank {member.rank}: rank 0 does not answer at {member.address} within "
            f"{member.start_timeout_s:g} s ({START_TIMEOUT}): {reason:.150}"
        ) from error
    store.set_timeout(LONG_TIMEOUT)
    return store


def _prepare(config: RunConfig, local_rank: int = 0) -> World:
    """Choose the device, of a world of one rank; make kernels deterministic, where asked for."""
    if config.deterministic is not False:
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # untyped in torch
    if config.deterministic == "layout":
        torch.set_num_threads(1)  # several may sum in another order
    device = choose_device(config, local_rank)
    times = PhaseTimes(time.perf_counter)
    if gpu.is_gpu(device):
        # The marks of times are made on the device that is set.
        gpu.backend().set_device(device)
        times = PhaseTimes(gpu.mark)
    return World(device=device, times=times, compiles=config.compile)
