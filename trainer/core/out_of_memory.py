"""Recognise an allocation that failed, and survive it where that is possible."""

from __future__ import annotations

import gc
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import torch

from trainer.core import gpu
from trainer.core.errors import DoesNotFitError, TrainError

# How the messages begin of allocators, of driver calls, and of libraries that allocate for
# themselves, such as `CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...`.
_FAILED = re.compile(
    r"(\[enforce fail.*\] .*)?DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|(CUDA|HIP) (error: )?out of memory"
    r"|(CUDA|HIP|cuDNN|MIOpen) error: \w*ALLOC(ATION)?_?FAILED"
    r"|std::bad_alloc$"
    r"|could not create a (primitive|memory object|memory)$"  # oneDNN
    # More bytes, or numbers, than an address has bits for.
    r"|Storage size calculation overflowed|numel: integer multiplication overflow",
    re.IGNORECASE,
)
_FROM_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell an allocation failure, of a device's allocator or the host's, from any other error.

    So it is when another error was raised from it, as compilers and models do. A `TrainError`
    names its reason already, and what failed in a loading process failed in another's memory.
    """
    seen = set()
    while isinstance(error, Exception) and not isinstance(error, TrainError):
        text = str(error)
        if id(error) in seen or _FROM_WORKER.match(text):
            return False
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _FAILED.match(text):
            return True
        seen.add(id(error))
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


@final
class AllocationGuard:
    """Ends its block quietly when an allocation fails in it; any other error passes.

    By the time `failed` can be read the traceback is gone, and with it every activation that the
    failed graph referred to. `on_failure` is called before, with the error.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self.failed = False
        self._on_failure = on_failure

    def __enter__(self) -> AllocationGuard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.failed = is_out_of_memory(error)
        if self.failed and error is not None and self._on_failure is not None:
            self._on_failure(error)
        return self.failed


@contextmanager
def no_replay(what: str) -> Iterator[None]:
    """End the run with `DoesNotFitError` when an allocation fails in a block that has no replay."""
    with AllocationGuard() as guard:
        yield
    if guard.failed:
        raise DoesNotFitError(f"out of memory {what}")


def peak_bytes(device: torch.device) -> int:
    """Give the most memory this process has had: the device's, or resident memory on a CPU."""
    if gpu.is_gpu(device):
        return int(gpu.backend().max_memory_allocated(device))
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def begin_peak(device: torch.device) -> None:
    """Free what tuning took of a GPU, so that `peak_bytes` is the run's own from here on."""
    if gpu.is_gpu(device):
        release_memory()
        gpu.backend().reset_peak_memory_stats(device)
    else:
        # On Linux the peak of resident memory begins anew by that.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def release_memory() -> None:
    """Free what a failed attempt left: tensors in cycles, and the device's cached blocks."""
    gc.collect()
    if gpu.backend().is_initialized():
        gpu.backend().empty_cache()
