"""A model and data for runs over several ranks: what goes wrong on one, and what is slow."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.core.errors import DataError

WIDTH = 4


class Rows:
    """Rows of numbers whose label is the sign of their sum; reading one takes `pause` seconds."""

    draws_randomness = False

    def __init__(self, num_samples: int = 96, pause: float = 0.0) -> None:
        self.pause = pause
        self.rows = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.pause)
        row = self.rows[index]
        return {"x": row, "labels": (row.sum() > 0).long()}


class Net(nn.Module):
    """Two layers, and `pause`; at the fourth training forward of one rank `fault` happens."""

    def __init__(self, fault: str | None = None, rank: int = 1, pause: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.fault = fault if int(os.environ.get("RANK", "0")) == rank else None
        self.pause, self.calls = pause, 0
        if "LOUD" in os.environ:
            os.write(2, f"rank {os.environ['RANK']} is built\n".encode())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            time.sleep(self.pause)
            if self.fault is not None and self.calls == 4:
                happen(self.fault)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def happen(fault: str) -> None:
    if fault == "data":
        raise DataError("rows.txt: record 7 is torn")
    if fault == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, fault))


class SlowNet(Net):
    """The same, slow: it computes `sample` seconds for each sample, and does nothing for `pause`.

    On rank 1 it does nothing for `behind` times as much longer.
    """

    def __init__(self, sample: float = 0.0, pause: float = 0.0, behind: float = 0.0) -> None:
        is_behind = dist.is_initialized() and dist.get_rank() == 1
        super().__init__(pause=pause * (1 + behind * is_behind))
        self.sample = sample

    def forward(self, x: Tensor) -> Tensor:
        end = time.thread_time() + self.sample * len(x) * self.training
        while time.thread_time() < end:
            pass
        return super().forward(x)
