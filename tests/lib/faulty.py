"""A model and data for runs over several ranks, and what can go wrong on one of them."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.core import durable
from trainer.core.errors import DataError

WIDTH = 4

for_good = ExitStack()


class Rows:
    """Rows of numbers; the label is the sign of their sum."""

    draws_randomness = False

    def __init__(self, num_samples: int = 96) -> None:
        self.rows = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"x": row, "labels": (row.sum() > 0).long()}


class Net(nn.Module):
    """Two layers; at one training forward of one rank something happens, once per run.

    Args:
        fault: what.
        rank: where.
        at: the training forward, from 1; 0 is the constructor.
        pause: seconds each forward takes.
        once: a file that remembers that it happened.
    """

    def __init__(
        self,
        fault: str | None = None,
        rank: int = 1,
        at: int = 4,
        pause: float = 0.0,
        once: str | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        mine = int(os.environ.get("RANK", "0")) == rank
        done = once is not None and Path(once).exists()
        self.fault = fault if mine and not done else None
        self.at, self.pause, self.once, self.calls = at, pause, once, 0
        if self.fault is not None and at == 0:
            happen(self.fault)
        if "LOUD" in os.environ:
            os.write(2, f"rank {os.environ['RANK']} is built\n".encode())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            time.sleep(self.pause)
            if self.fault is not None and self.calls == self.at:
                if self.once is not None:
                    Path(self.once).touch()
                happen(self.fault)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Double(Net):
    """The same in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class NoCheckpoints(durable.FileSystem):
    """A disk that takes no checkpoint."""

    def create(self, path: Path) -> int:
        if path.suffix == ".safetensors":
            raise OSError(errno.EIO, "disk full")
        return super().create(path)


def happen(fault: str) -> None:
    """What can go wrong."""
    if fault == "unwritable":
        for_good.enter_context(durable.use(NoCheckpoints()))
        return
    if fault == "raise":
        raise ValueError("injected fault")
    if fault == "data":
        raise DataError("rows.txt: record 7 is torn")
    if fault == "exit":
        os._exit(3)
    if fault == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, fault))
    time.sleep(5)
