"""Read from the environment which rank this is, where torchrun or srun started the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from trainer.core.errors import ConfigError

START_TIMEOUT = "TRAIN_MEETING_S"  # environment variable: seconds to wait for the other ranks
START_TIMEOUT_S = "600"  # as long as torchrun's wait

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One process's place among the ranks of a run."""

    rank: int  # of the process, from 0
    size: int  # number of ranks, on all machines
    local_rank: int  # of the process on its machine
    local_size: int  # ranks on its machine
    address: str = ""  # where ranks meet: a file's path on one machine, or `host:port`
    is_hosted: bool = False  # whether something else than the first rank listens there
    job: str = ""  # whose ranks they are, of all jobs that use the address
    start_timeout_s: float | None = None  # to wait for the others; None is until we are ended

    @property
    def is_ours(self) -> bool:
        """Whether the supervisor beside it starts all ranks of the run, and no launcher does."""
        return self.start_timeout_s is None


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Read the place that torchrun, a job with RANK and WORLD_SIZE, or srun gave this process.

    None where this process is to start its own ranks, if any.
    """
    names = _names(environment)
    if names[0] not in environment:
        return None
    written = dict[str, str]()
    for name in (*names, START_TIMEOUT):
        if name in environment:
            written[name] = environment[name]
    try:
        rank, size = int(written[names[0]]), int(written.get(names[1], "1"))
        # Slurm writes "4(x2),3" for four tasks on each of two nodes, and three on another.
        counts = written.get(names[3], str(size)).split(",")
        local_size = max(int(count.partition("(x")[0]) for count in counts)
        local_rank = int(written.get(names[2], str(rank % local_size)))
        timeout_s = int(written.get(START_TIMEOUT, START_TIMEOUT_S))
        is_valid = 0 <= rank < size and 0 <= local_rank < local_size <= size and timeout_s > 0
    except (ValueError, ZeroDivisionError):
        is_valid = False
    if not is_valid:
        listed = " ".join(f"{name}={value}" for name, value in written.items())
        raise _fault(
            f"{listed} in the environment: invalid; required: 0 <= {names[0]} < {names[1]}, 0 <= "
            f"{names[2]} < {names[3]}, and the others positive"
        )
    if size == 1:
        return None
    job = ""
    # Slurm's job is no name that all ranks share where something else started them.
    if names is _SRUN:
        job = environment.get("SLURM_JOB_ID", "")
    job = environment.get("TORCHELASTIC_RUN_ID", job)
    return Membership(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=_address(environment, names, size),
        is_hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # Without TORCHELASTIC_RESTART_COUNT, in which machines differ.
        job=job,
        start_timeout_s=timeout_s,
    )


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Give this process's number among those that a launcher started, 0 where it is alone."""
    written = environment.get(_names(environment)[0], "")
    return 0 if not written.isdecimal() else int(written)


def first_host(listed: str) -> str:
    """Name the first machine of a list as Slurm writes it: gpu03 of `gpu[03-05,9],head`."""
    return "".join(re.findall(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", listed)[0])


def _names(environment: Mapping[str, str]) -> tuple[str, str, str, str]:
    # An sbatch script, and srun with one task, have Slurm's variables too.
    is_srun = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return _SRUN if is_srun and "RANK" not in environment else _TORCHRUN


def _address(environment: Mapping[str, str], names: tuple[str, ...], size: int) -> str:
    if {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        port = environment["MASTER_PORT"]
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise _fault(f"MASTER_PORT={port!r} in the environment: not a port (1 to 65535)")
        return f"{environment['MASTER_ADDR']}:{port}"
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = environment.get("SLURM_JOB_ID", "")
    if names is not _SRUN or not listed or not job.isdecimal():
        raise _fault(
            f"{names[1]}={size}: set MASTER_ADDR and MASTER_PORT as well, or the ranks cannot meet"
        )
    # A port that two jobs on one node seldom share.
    return f"{first_host(listed)}:{20000 + int(job) % 10000}"


def _fault(text: str) -> ConfigError:
    error = ConfigError(text)
    error.is_own = True  # every rank prints it, since its environment is its own
    return error
