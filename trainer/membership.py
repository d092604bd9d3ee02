"""Whether something else started this process as one rank of several: torchrun, srun, a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.errors import ConfigError

MEETING = "MASTER_ADDR and MASTER_PORT"


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
        board: file to note this rank's place on, or None.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    meeting: str = "env://"
    board: Path | None = None


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """Read what torchrun, or a job with RANK and WORLD_SIZE, says; srun's own words count too.

    Returns:
        None where this process is to start its own ranks, if any.

    Raises:
        ConfigError: the place is told, but not where the ranks meet.
    """
    words = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in environment and _count(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        words = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
    size = _count(environment, words[1], 1)
    if words[0] not in environment or size == 1:
        return None
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise ConfigError(
            f"parallel.ranks: {words[1]}={size} says that this is one of {size} ranks; to meet the "
            f"others it needs {MEETING} in the environment, as torchrun sets them"
        )
    rank = _count(environment, words[0], 0)
    return Membership(
        rank=rank,
        size=size,
        local_rank=_count(environment, words[2], 0),
        local_size=_count(environment, words[3], size),
    )


def _count(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    # Slurm writes "4(x2)" for four tasks on each of two nodes.
    digits = environment.get(name, "").partition("(")[0]
    return int(digits) if digits.isdecimal() else otherwise
