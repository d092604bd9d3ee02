"""Running out of memory as an event: recognised exactly, and survived where it can be."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import final

import torch


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell an allocation failure, of the device's allocator or the CPU's, from any other error."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


@final
class AllocationGuard:
    """Ends its block quietly when an allocation fails in it; any other error passes.

    By the time `failed` can be read the traceback is gone, and with it every activation that the
    failed graph held.
    """

    def __init__(self) -> None:
        self.failed = False

    def __enter__(self) -> AllocationGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.failed = is_out_of_memory(error)
        return self.failed


THRASHING = 2
"""Steps in a row with retries that are no accident."""


@final
class Thrash:
    """Hears an allocator struggle before it fails.

    Where a request does not fit, CUDA's caching allocator waits for the device, frees what it has
    cached and tries again. A step with such retries is slow, and the next may fail.

    Args:
        num_retries: how often the allocator tried again since the process began.
    """

    def __init__(self, num_retries: Callable[[], int]) -> None:
        self._num_retries = num_retries
        self._seen = num_retries()
        self._in_a_row = 0

    def __call__(self) -> bool:
        """Tell, after each step, whether this one and the one before needed retries."""
        before, self._seen = self._seen, self._num_retries()
        self._in_a_row = self._in_a_row + 1 if self._seen > before else 0
        if self._in_a_row < THRASHING:
            return False
        self._in_a_row = 0
        return True


def allocator_retries(device: torch.device) -> Callable[[], int]:
    """Give the counter of a device's allocator; it stays at zero where nothing is counted."""
    if device.type != "cuda":
        return lambda: 0
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
