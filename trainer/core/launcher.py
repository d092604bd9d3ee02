"""Where this process stands: one rank of several that torchrun or srun started, or one machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.core.errors import ConfigError

MEETING = "MASTER_ADDR and MASTER_PORT"

PATIENCE = "TRAIN_MEETING_S"
"""Environment variable: seconds that ranks which were started elsewhere wait for each other."""

PATIENCE_S = 600.0
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
        meeting: where the ranks find each other: `file://PATH` or `tcp://HOST:PORT`.
        listener: open file of a socket to listen at, for the rank that others connect to.
        is_hosted: whether something else than the first rank listens there.
        attempt: of which job, and which one it is of those that meet there.
        patience_s: how long they wait for each other; None is until their supervisor ends them.
        board: file to note this rank's place on, or None.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    meeting: str
    listener: int | None = None
    is_hosted: bool = False
    attempt: str = ""
    patience_s: float | None = None
    board: Path | None = None


def is_loss(error: BaseException) -> bool:
    """Tell whether a collective failed since another rank is gone, or does not come."""
    if not isinstance(error, RuntimeError):
        return False
    # By name, for PyTorch is not imported here.
    kind, text = type(error).__name__, str(error)
    if kind == "DistBackendError":
        return any(word in text for word in _NCCL)
    return kind in {"DistNetworkError", "DistStoreError"} or _GLOO.search(text) is not None


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Read what torchrun, or a job with RANK and WORLD_SIZE, says; srun's own words count too.

    Returns:
        None where this process is to start its own ranks, if any.

    Raises:
        ConfigError: the place is told, but not where the ranks meet; or there is no such place.
    """
    words = _words(environment)
    if words[0] not in environment:
        return None
    try:
        rank, size, local_rank, local_size = _place(environment, words)
        patience_s = _number(environment, PATIENCE, int(PATIENCE_S), least=1)
    except ConfigError as error:
        error.is_own = True
        raise
    if size == 1:
        return None
    return Membership(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        meeting=f"tcp://{_address(environment, words, size)}",
        is_hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=f"{_job(environment)}/{environment.get('TORCHELASTIC_RESTART_COUNT', '')}",
        patience_s=patience_s,
    )


def _place(
    environment: Mapping[str, str], words: tuple[str, str, str, str]
) -> tuple[int, int, int, int]:
    """Read rank, size, local rank and local size.

    Raises:
        ConfigError: one is no number, or out of range.
    """
    size = _number(environment, words[1], 1, least=1)
    rank = _number(environment, words[0], 0, below=size, whole=words[1])
    local_size = _number(environment, words[3], size, least=1)
    if local_size > size:
        raise ConfigError(f"{words[3]}={local_size}: {words[1]}={size} ranks are all there are")
    local_rank = _number(environment, words[2], rank % local_size, below=local_size, whole=words[3])
    return rank, size, local_rank, local_size


def _number(
    environment: Mapping[str, str],
    name: str,
    otherwise: int,
    *,
    least: int = 0,
    below: int | None = None,
    whole: str = "",
) -> int:
    """Read a number of the environment.

    Raises:
        ConfigError: it is none, or out of range.
    """
    written = environment.get(name, str(otherwise))
    # Slurm writes "4(x2),3" for four tasks on each of two nodes, and three on another.
    counts = [part.partition("(x")[0] for part in written.split(",")]
    if not all(each.isascii() and each.isdecimal() and int(each) >= least for each in counts):
        raise ConfigError(f"{name}={written!r} in the environment: not a number from {least} on")
    most = max(map(int, counts))
    if below is not None and most >= below:
        raise ConfigError(
            f"{name}={written} in the environment: {whole}={below} makes {below - 1} the largest "
            "valid value"
        )
    return most


def _address(environment: Mapping[str, str], words: tuple[str, str, str, str], size: int) -> str:
    """Tell where the ranks meet.

    Raises:
        ConfigError: nothing says it, or not as a host and a port.
    """
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        address = slurm_address(environment) if words is _SRUN else None
        if address is None:
            raise ConfigError(
                f"parallel.ranks: {words[1]}={size} says that this is one of {size} ranks; to meet "
                f"the others it needs {MEETING} in the environment, as torchrun sets them"
            )
        return address
    port = _number(environment, "MASTER_PORT", 0, least=1, below=65536, whole="a port")
    return f"{environment['MASTER_ADDR']}:{port}"


def _job(environment: Mapping[str, str]) -> str:
    """Name the job in a word that all of its ranks are given, so that two at one port do not mix.

    Slurm's own is no such word where something else than one srun started the ranks.
    """
    is_srun = _count(environment, "SLURM_STEP_NUM_TASKS", 1) > 1
    slurm = environment.get("SLURM_JOB_ID", "") if is_srun else ""
    return environment.get("TORCHELASTIC_RUN_ID", slurm)


def task(environment: Mapping[str, str] = os.environ) -> int:
    """Give the number of this process among those of one command, 0 where it is alone."""
    return _count(environment, _words(environment)[0], 0)


def node_of(typed: int | str, num_nodes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Resolve `parallel.node`.

    Raises:
        ConfigError: there is no such machine, or nothing says which one this is; or something
            else starts ranks.
    """
    if num_nodes == 1:
        return 0
    if "RANK" in environment:
        raise ConfigError(
            f"parallel.nodes={num_nodes}: RANK says that something else started the ranks; leave "
            "parallel.nodes out to join them"
        )
    tasks = _count(environment, "SLURM_STEP_NUM_TASKS", 1)
    if tasks not in (1, num_nodes):
        raise ConfigError(
            f"parallel.nodes={num_nodes}: srun started {tasks} tasks; start one a node "
            "(--ntasks-per-node=1), or leave parallel.nodes out to join them as ranks"
        )
    if typed == "auto" and "SLURM_NODEID" not in environment:
        raise ConfigError(
            f"parallel.node: which of the {num_nodes} machines this is, is not known; type 0 to "
            f"{num_nodes - 1}"
        )
    node = _count(environment, "SLURM_NODEID", 0) if typed == "auto" else int(typed)
    if node >= num_nodes:
        raise ConfigError(f"parallel.node={node}: the largest valid value is {num_nodes - 1}")
    return node


def rendezvous_of(typed: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Resolve `parallel.rendezvous`.

    Raises:
        ConfigError: it is not typed, and Slurm does not say which machine is the first.
    """
    address = typed or slurm_address(environment)
    if address is None:
        raise ConfigError(
            "parallel.rendezvous: needs the host and a free port of machine 0, e.g. 10.0.0.1:29500"
        )
    return address


def slurm_address(environment: Mapping[str, str]) -> str | None:
    """Tell where the processes of a Slurm job meet, at a port that two jobs seldom share."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = environment.get("SLURM_JOB_ID", "")
    if not listed or not job.isdecimal():
        return None
    return f"{first_host(listed)}:{20000 + int(job) % 10000}"


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


def _words(environment: Mapping[str, str]) -> tuple[str, str, str, str]:
    is_srun = "RANK" not in environment and _count(environment, "SLURM_STEP_NUM_TASKS", 1) > 1
    return _SRUN if is_srun else _TORCHRUN


def _count(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    # Slurm writes "4(x2)" for four tasks on each of two nodes.
    digits = environment.get(name, "").partition("(")[0]
    return int(digits) if digits.isdecimal() else otherwise
