"""Count how often the host waits for the device."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@final
class GpuWaits:
    """Counts what PyTorch warns of as a wait for the GPU."""

    def begin(self) -> None:
        """Count from here."""
        torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> None:
        """Count no further."""
        torch.cuda.set_sync_debug_mode("default")

    def places(self, caught: Sequence[warnings.WarningMessage]) -> Counter[str]:
        """Give the lines that waited, and how often each did."""
        return Counter(
            f"{Path(each.filename).name}:{each.lineno}"
            for each in caught
            if "called a synchronizing" in str(each.message)
        )


@final
class ReadNumbers(TorchDispatchMode):
    """Counts numbers that are read from tensors, each of which would be a wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def begin(self) -> None:
        """Count from here."""
        self.__enter__()

    def end(self) -> None:
        """Count no further."""
        self.__exit__(None, None, None)

    def places(self, _: object) -> Counter[str]:
        """Give the lines that read, and how often each did."""
        return self.found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run the operator, and note whether it reads a number."""
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [f for f in traceback.extract_stack() if "site-packages" not in f.filename]
            at = frames[-2]
            self.found[f"{Path(at.filename).name}:{at.lineno}"] += 1
        return func(*args, **(kwargs or {}))
