"""The ranks of a run: who am I, how many are we, and sums over all of us.

The ground floor. A world of one rank needs no process group and sends nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The data-parallel ranks of one run.

    Attributes:
        rank: this process, from 0.
        size: number of ranks.
        device: where this rank computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place. Collective; sends nothing on one rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Add a few numbers over all ranks, in float64. Collective; sends nothing on one rank."""
        if self.size == 1:
            return list(numbers)
        total: list[float] = self.sum(
            torch.tensor(numbers, dtype=torch.float64, device=self.device)
        ).tolist()
        return total

    def max(self, values: Tensor) -> Tensor:
        """Take the elementwise maximum over all ranks. Collective."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.size > 1:
            dist.barrier()


def rng_key(*parts: int | str) -> int:
    """Hash the parts into a seed for one random draw.

    The CPU generator reads only the low 32 bits of a seed, so every part must reach them;
    BLAKE2b mixes them all. Costs about 1 us.

    Args:
        parts: what the draw belongs to, e.g. `(seed, step, micro_batch)`.

    Returns:
        An integer in [0, 2**63).
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
