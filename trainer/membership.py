"""Where this process stands: one rank of several that torchrun or srun started, or one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.errors import ConfigError

MEETING = "MASTER_ADDR and MASTER_PORT"

_LOST = (
    "Connection closed",
    "Application timeout",
    "Timed out waiting",
    "Connection reset",
    "gloo",
)
"""What collectives say when another rank is gone, or does not come."""

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
        meeting: where the ranks find each other, as PyTorch writes it.
        listener: open file of a socket to listen at, for the rank that others connect to.
        board: file to note this rank's place on, or None.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    meeting: str = "env://"
    listener: int | None = None
    board: Path | None = None


def is_loss(error: BaseException) -> bool:
    """Tell whether a collective failed since another rank is gone, or does not come."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Read what torchrun, or a job with RANK and WORLD_SIZE, says; srun's own words count too.

    Returns:
        None where this process is to start its own ranks, if any.

    Raises:
        ConfigError: the place is told, but not where the ranks meet.
    """
    words = _words(environment)
    size = _count(environment, words[1], 1)
    if words[0] not in environment or size == 1:
        return None
    meeting = "env://"
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        address = slurm_address(environment) if words is _SRUN else None
        if address is None:
            raise ConfigError(
                f"parallel.ranks: {words[1]}={size} says that this is one of {size} ranks; to meet "
                f"the others it needs {MEETING} in the environment, as torchrun sets them"
            )
        meeting = f"tcp://{address}"
    return Membership(
        rank=_count(environment, words[0], 0),
        size=size,
        local_rank=_count(environment, words[2], 0),
        local_size=_count(environment, words[3], size),
        meeting=meeting,
    )


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
