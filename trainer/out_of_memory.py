"""Running out of memory as an event: recognised exactly, and survived where it can be."""

from __future__ import annotations

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
