"""Read from the environment which rank this is, where torchrun or srun started the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.core.errors import ConfigError

START_TIMEOUT = "TRAIN_MEETING_S"
"""Environment variable: seconds that ranks which were started elsewhere wait for each other."""

START_TIMEOUT_S = 600
"""As long as torchrun's do."""

_GLOO = re.compile(r"\[[^\[\]\n]*\bgloo/[^\[\]\n]*\.(cc|cpp|h):\d+\]")
"""A place in gloo's source, which its errors name; all of them are the end of a connection."""

_NCCL = ("ncclRemoteError", "remote process exited", "Connection", "timeout", "aborted")
"""What NCCL says when another rank is gone, or does not come."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This process's place among the ranks of a run.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks, on all machines.
        local_rank: of this process on this machine.
        local_size: ranks on this machine.
        address: where the ranks find each other: a file's path on one machine, or `host:port`.
        is_hosted: whether something else than the first rank listens there.
        attempt: of which job, and which one it is of those that use the address.
        start_timeout_s: how long they wait for each other; None is until their supervisor ends
            them.
        board: file to note this rank's place on, or None.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    is_hosted: bool = False
    attempt: str = ""
    start_timeout_s: float | None = None
    board: Path | None = None


def is_peer_failure(error: BaseException) -> bool:
    """Tell whether a collective failed since another rank is gone, or does not come."""
    if not isinstance(error, RuntimeError):
        return False
    # By name, for PyTorch is not imported here.
    kind, text = type(error).__name__, str(error)
    if kind == "DistBackendError":
        return any(word in text for word in _NCCL)
    return kind in {"DistNetworkError", "DistStoreError"} or _GLOO.search(text) is not None


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Read the place that torchrun, a job with RANK and WORLD_SIZE, or srun gave this process.

    Returns:
        None where this process is to start its own ranks, if any.

    Raises:
        ConfigError: a number of it cannot be, or nothing says where the ranks find each other.
    """
    names = _names(environment)
    if names[0] not in environment:
        return None
    try:
        size = _number(environment, names[1], 1, least=1)
        rank = _number(environment, names[0], 0, below=(names[1], size))
        local_size = _number(environment, names[3], size, least=1)
        if local_size > size:
            raise ConfigError(f"{names[3]}={local_size}: {names[1]}={size} ranks are all there are")
        otherwise = rank % local_size
        local_rank = _number(environment, names[2], otherwise, below=(names[3], local_size))
        timeout_s = _number(environment, START_TIMEOUT, START_TIMEOUT_S, least=1)
        if size == 1:
            return None
        address = _address(environment, names, size)
    except ConfigError as error:
        error.is_own = True
        raise
    # Slurm's job is no name that all ranks share where something else started them.
    job = environment.get("SLURM_JOB_ID", "") if names is _SRUN else ""
    job = environment.get("TORCHELASTIC_RUN_ID", job)
    return Membership(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        is_hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=f"{job}/{environment.get('TORCHELASTIC_RESTART_COUNT', '')}",
        start_timeout_s=timeout_s,
    )


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Give this process's number among those that a launcher started, 0 where it is alone."""
    written = environment.get(_names(environment)[0], "")
    return int(written) if written.isdecimal() else 0


def first_host(listed: str) -> str:
    """Name the first machine of a list as Slurm writes it: `gpu[03-05,9],head` begins with gpu03.

    Args:
        listed: such as SLURM_JOB_NODELIST.
    """
    head, bracket, rest = listed.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.partition(",")[0].partition("-")[0] + tail.partition(",")[0]


def _names(environment: Mapping[str, str]) -> tuple[str, str, str, str]:
    # An sbatch script, and srun with one task, have Slurm's variables too.
    is_srun = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return _SRUN if is_srun and "RANK" not in environment else _TORCHRUN


def _number(
    environment: Mapping[str, str],
    name: str,
    otherwise: int,
    *,
    least: int = 0,
    below: tuple[str, int] | None = None,
) -> int:
    """Read a number of the environment.

    Args:
        environment: variables.
        name: of the variable.
        otherwise: the value where there is none.
        least: smallest valid value.
        below: name and value of what is larger than any valid value.

    Raises:
        ConfigError: it is none, or out of range.
    """
    written = environment.get(name, str(otherwise))
    # Slurm writes "4(x2),3" for four tasks on each of two nodes, and three on another.
    counts = [part.partition("(x")[0] for part in written.split(",")]
    if not all(each.isascii() and each.isdecimal() and int(each) >= least for each in counts):
        raise ConfigError(f"{name}={written!r} in the environment: not a number from {least} on")
    most = max(map(int, counts))
    if below is not None and most >= below[1]:
        raise ConfigError(
            f"{name}={written} in the environment: {below[0]}={below[1]} makes {below[1] - 1} the "
            "largest valid value"
        )
    return most


def _address(environment: Mapping[str, str], names: tuple[str, ...], size: int) -> str:
    """Find where the ranks connect: MASTER_ADDR and MASTER_PORT, or the first node of a Slurm job.

    Raises:
        ConfigError: nothing says it, or not as a host and a port.
    """
    if {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        port = _number(environment, "MASTER_PORT", 0, least=1, below=("a port", 65536))
        return f"{environment['MASTER_ADDR']}:{port}"
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = environment.get("SLURM_JOB_ID", "")
    if names is not _SRUN or not listed or not job.isdecimal():
        raise ConfigError(
            f"parallel.ranks: {names[1]}={size} says that this is one of {size} ranks; to find the "
            "others it needs MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them"
        )
    # A port that two jobs on one node seldom share.
    return f"{first_host(listed)}:{20000 + int(job) % 10000}"
