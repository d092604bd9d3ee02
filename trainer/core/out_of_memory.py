"""Running out of memory as an event: recognised exactly, and survived where it can be."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import final

import torch

from trainer.core.errors import DoesNotFitError, TrainError

_FAILED = re.compile(
    r"(\[enforce fail.*\] .*)?DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|(CUDA|HIP) (error: )?out of memory"
    r"|(CUDA|HIP|cuDNN|MIOpen) error: \w*ALLOC(ATION)?_?FAILED"
    r"|std::bad_alloc$",
    re.IGNORECASE,
)
"""How messages begin that say so: of allocators, of driver calls, and of libraries that make room
for themselves, such as `CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...`."""

_NOT_INITIALIZED = re.compile(r"(CUDA|cuDNN) error: (CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED")
"""What the same libraries say when memory is too short to set themselves up, among other things."""

_FROM_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")

SCARCE_BYTES = 256 * 2**20
"""Free memory of a device below which a library that could not set itself up lacked memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell an allocation failure, of a device's allocator or the host's, from any other error.

    So it is when another error was raised from it, as compilers and models do. A `TrainError` has
    said already what it is, and what failed in a loading process failed in another's memory.
    """
    seen = set()
    while isinstance(error, Exception) and not isinstance(error, TrainError):
        if id(error) in seen or _FROM_WORKER.match(str(error)):
            return False
        if _is_failed_allocation(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def _is_failed_allocation(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_FAILED.match(text)) or (bool(_NOT_INITIALIZED.match(text)) and _is_scarce())


def _is_scarce() -> bool:
    """Whether the current device has next to no memory that no allocator holds."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # untyped in torch
        return False
    free, _ = torch.cuda.mem_get_info()
    return free < SCARCE_BYTES


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


@contextmanager
def fatal(what: str) -> Iterator[None]:
    """End the run with one line when an allocation fails in this block, which cannot be repeated.

    Args:
        what: ran out of memory, and the remedy.

    Raises:
        DoesNotFitError: it did.
    """
    with AllocationGuard() as guard:
        yield
    if guard.failed:
        raise DoesNotFitError(f"out of memory {what}")


def release_memory() -> None:
    """Free what a failed attempt left: tensors in cycles, and the device's cached blocks."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # untyped in torch
        torch.cuda.empty_cache()


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
