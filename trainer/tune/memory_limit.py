"""Find how much memory there is, and how much of it tensors can have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from trainer.core import gpu
from trainer.report.records import device_name
from trainer.tune import history
from trainer.tune.peak_bytes import MemoryEstimate

# Share left alone: on a GPU for fragmentation and libraries, on a CPU for the rest of the
# machine, whose use changes while a run goes on
RESERVE = {"gpu": 0.08, "cpu": 0.10}
# What a GPU leaves alone at least, up to a share: workspaces of cuBLAS, NCCL, and kernels that are
# loaded when they are first used take as much on a small card as on a large one
GPU_RESERVE, MOST_RESERVE = 3 * 2**29, 0.25
LEARNT_MARGIN = 0.02  # beyond the most that a run took of what was predicted
# Bytes on top of each byte of activations: on a CPU allocators and scratch inside of kernels take
# 24 to 98 % more, and who takes too much there is killed
OVERHEAD = {"gpu": 0.0, "cpu": 1.0}
TYPED_LIMIT = "accum.memory"  # where a limit is from that a user typed
MEBI = 2**20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What one rank may use."""

    bytes: int  # for tensors and what their allocation costs on top, the model included
    source: str  # where the number is from, for a person to read
    reserve: float = 0.0  # share of the memory that is left alone beside
    inputs: int = 0  # bytes taken off for inputs which wait to be computed with
    overhead: float = 0.0  # bytes that allocating a byte of activations costs on top

    def with_overhead(self, peak: MemoryEstimate) -> int:
        """Give the bytes that a peak takes of the limit."""
        return peak.peak_bytes + int(self.overhead * peak.activations)


def memory_limit(
    device: torch.device,
    *,
    resident_bytes: int = 0,
    asked: int | None = None,
    source: str = TYPED_LIMIT,
    local_ranks: int = 1,
    root: Path = Path("/"),
) -> MemoryLimit:
    """Find what one rank may use, less a reserve.

    `resident_bytes` of the model are part of what is used already; `asked` bytes are taken as they
    are, and `root` is where Linux shows its limits.
    """
    if asked is not None:
        left, resident_bytes = asked, 0
    elif gpu.is_gpu(device):
        left, source = gpu.free_bytes(device), "free GPU memory"
    else:
        left, source = min(_host_limits(root))
        if local_ranks > 1:
            left, source = left // local_ranks, f"{source}, shared by {local_ranks} ranks"
    excess, why = None, ""
    # Of a typed limit nobody knows which card it is for.
    if asked is None and (learnt := history.excess_of(device_name(device))) is not None:
        excess, count = learnt
        why = f", as {count} runs took up to {excess:+.0%} of what was predicted"
    reserve = reserve_share(gpu.kind_of(device), left, excess)
    return MemoryLimit(
        bytes=resident_bytes + int(left * (1 - reserve)),
        source=f"{source}, {reserve:.0%} kept free{why}",
        reserve=reserve,
        overhead=OVERHEAD[gpu.kind_of(device)],
    )


def reserve_share(kind: str, left: int, excess: float | None = None) -> float:
    """Give the share of what is left, in bytes, that no tensor may have.

    Where it is known by which share runs took more than was predicted, that counts on a card: its
    fragmentation is part of what they took. What else a machine does nobody has measured.
    """
    share = RESERVE[kind]
    if excess is not None:
        needed = max(excess, 0.0) / (1 + max(excess, 0.0)) + LEARNT_MARGIN
        share = needed if kind == "gpu" else max(needed, share)
    if kind == "gpu" and left > 0:
        share = max(share, min(GPU_RESERVE / left, MOST_RESERVE))
    return min(share, MOST_RESERVE)


def _host_limits(root: Path) -> Iterator[tuple[int, str]]:
    """List everything that bounds this process: bytes left, and what they are."""
    available = _entries(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield available * 1024, "available memory"
    else:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Systems that do not say what is available are desktops with other programs open.
        yield pages // 2, "half of physical memory"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                mount = root / "sys/fs/cgroup"
                of_limit, of_usage = "memory.max", "memory.current"
                of_cached_pages = "inactive_file"
            elif "memory" in controllers.split(","):
                mount = root / "sys/fs/cgroup/memory"
                of_limit, of_usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
                of_cached_pages = "total_inactive_file"
            else:
                continue
            # From the process's group up to the root; inside a container only that is visible.
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents)[: len(group.relative_to(mount).parts) + 1]:
                with suppress(OSError, ValueError):  # absent, or "max": no limit at this level
                    limit = int((folder / of_limit).read_text())
                    used = int((folder / of_usage).read_text())
                    # Cached file pages are dropped under pressure, before anything is killed.
                    used -= _entries(folder / "memory.stat").get(of_cached_pages, 0)
                    yield max(0, limit - used), "the cgroup's limit"


def _entries(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    entries = dict[str, int]()
    # Absent where the system, or a version of cgroups, has no such file.
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdigit():
                entries[words[0]] = int(words[1])
    return entries
