"""Find how much memory there is, and how much of it tensors can have."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

RESERVE = {"cuda": 0.08, "cpu": 0.10}
"""Share left alone: on a GPU for fragmentation and libraries, on a CPU for the rest of the machine,
whose use changes while a run goes on."""

ASKED = "accum.memory"
"""Where a limit is from that a user typed."""

MEBI = 2**20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What one rank may use.

    Attributes:
        bytes: for tensors and for what their allocation costs on top, the model included.
        source: where the number is from, for a person to read.
        reserve: share of the memory that is left alone beside.
        inputs: bytes that were taken off for inputs which wait to be computed with.
    """

    bytes: int
    source: str
    reserve: float = 0.0
    inputs: int = 0

    def for_tensors(self, ratio: float, resident_bytes: int) -> int:
        """Tell how many bytes of tensors fit.

        Args:
            ratio: resident bytes per byte of tensors, at least 1.
            resident_bytes: tensors that are in memory already, and so have paid.
        """
        if self.bytes <= resident_bytes:
            return self.bytes
        return resident_bytes + int((self.bytes - resident_bytes) / ratio)

    def whole_for(self, needed: int, ratio: float, resident_bytes: int) -> float:
        """Tell of how many bytes of memory, with reserve and inputs, so many are for tensors."""
        grown = max(0, needed - resident_bytes) * ratio
        return (resident_bytes + grown + self.inputs) / (1 - self.reserve)


def memory_limit(
    device: torch.device,
    *,
    resident_bytes: int = 0,
    asked: int | None = None,
    local_ranks: int = 1,
    root: Path = Path("/"),
) -> MemoryLimit:
    """Find what one rank may use, less a reserve.

    Args:
        device: where it computes; on a CPU the ranks of a machine share its memory.
        resident_bytes: the model's tensors, which are part of what is used already.
        asked: `accum.memory` in bytes: plan for this much instead of looking.
        local_ranks: ranks on this machine.
        root: of the file system, where Linux shows its limits.
    """
    keep = 1.0 - RESERVE.get(device.type, 0.10)
    reserved = f"{1 - keep:.0%} in reserve"
    if asked is not None:
        return MemoryLimit(bytes=int(asked * keep), source=f"{ASKED}, {reserved}", reserve=1 - keep)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds without using is free to this process alone.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left, source = free + idle, "free GPU memory"
    else:
        left, source = min(_host_limits(root))
        left //= local_ranks
    share = f", shared by {local_ranks} ranks" if device.type == "cpu" and local_ranks > 1 else ""
    return MemoryLimit(
        bytes=resident_bytes + int(left * keep),
        source=f"{source}{share}, {reserved}",
        reserve=1 - keep,
    )


def _host_limits(root: Path) -> Iterator[tuple[int, str]]:
    """List everything that bounds this process.

    Yields:
        Bytes left, and what they are.
    """
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
            if not controllers:
                names = "memory.max", "memory.current", "inactive_file"
                yield from _cgroup_limits(root / "sys/fs/cgroup", path, names)
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                yield from _cgroup_limits(root / "sys/fs/cgroup/memory", path, names)


def _cgroup_limits(
    mount: Path, path: str, names: tuple[str, str, str]
) -> Iterator[tuple[int, str]]:
    """Walk from the process's group up to the root; inside a container only that is visible.

    Yields:
        Bytes left, and what they are.
    """
    limit_name, usage_name, cache_name = names
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        with suppress(OSError, ValueError):  # absent, or "max": no limit at this level
            limit = int((folder / limit_name).read_text())
            used = int((folder / usage_name).read_text())
            # Cached file pages are dropped under pressure, before anything is killed.
            used -= _entries(folder / "memory.stat").get(cache_name, 0)
            yield max(0, limit - used), "the cgroup's limit"


def _entries(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


@final
@dataclass(slots=True)
class Growth:
    """How much the memory of this process grew at most.

    Attributes:
        bytes: None where the system does not tell.
    """

    bytes: int | None = field(default=None)


@contextmanager
def resident_growth(device: torch.device) -> Iterator[Growth]:
    """Measure the highest rise of resident memory while the block runs.

    Yields:
        The rise, filled in at the end of the block.
    """
    growth = Growth()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield growth
        growth.bytes = torch.cuda.max_memory_reserved(device) - before
        return
    # The kernel's high-water mark counts from here once it is reset; where that is forbidden,
    # the mark of the whole life of the process tells only if it is passed.
    fresh = _reset_high_water()
    before, mark = _status_bytes("VmRSS:"), _status_bytes("VmHWM:")
    yield growth
    highest = _status_bytes("VmHWM:")
    if fresh or highest > mark:
        growth.bytes = max(0, highest - before)


def peak_bytes(device: torch.device) -> int:
    """Tell the most memory this process has had: the device's, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    return _entries(Path("/proc/self/status")).get(name, 0) * 1024


TELLING_BYTES = 32 * MEBI
"""Below this, thread stacks and the scratch of a library's first call drown the ratio."""

LARGEST_RATIO = 3.0
"""What other threads of the process may add at most before a measurement is not believed."""


def resident_ratio(growth: Growth, predicted_bytes: int) -> float | None:
    """Compare what memory a micro-batch took with the tensors it was predicted to hold.

    Allocators and scratch inside kernels add 24 to 98 % on a CPU.

    Args:
        growth: measured over one micro-batch.
        predicted_bytes: its tensors that were not there before.

    Returns:
        Resident bytes per byte of tensors, in [1, 3]; None when the micro-batch was too small
        to tell.
    """
    if growth.bytes is None or predicted_bytes < TELLING_BYTES:
        return None
    return min(LARGEST_RATIO, max(1.0, growth.bytes / predicted_bytes))
