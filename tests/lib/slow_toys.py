"""Models and data that are slow in one stated way, for runs whose end is to say which."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from trainer.core.world import World

WIDTH = 4


class SlowRows:
    """Rows of numbers whose label is the sign of their sum; reading one takes `pause` seconds."""

    draws_randomness = False

    def __init__(self, num_samples: int = 96, pause: float = 0.0) -> None:
        self.rows = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(0))
        self.pause = pause

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.pause)
        row = self.rows[index]
        return {"x": row, "labels": (row.sum() > 0).long()}


class SlowNet(nn.Module):
    """Two layers that take their time.

    Args:
        each: seconds a forward computes, however small the micro-batch is.
        sample: seconds it computes for each sample.
        pause: seconds it does nothing.
        behind: on rank 1 it does nothing for that much longer, in pauses.
        carry: seconds a reduction takes longer than the network.
    """

    def __init__(
        self,
        each: float = 0.0,
        sample: float = 0.0,
        pause: float = 0.0,
        behind: float = 0.0,
        carry: float = 0.0,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.each, self.sample, self.pause = each, sample, pause
        if os.environ.get("RANK") == "1":
            self.pause *= 1 + behind
        if carry:
            begin_sum = World.begin_sum

            def slowly(world: World, values: Tensor):
                time.sleep(carry)
                return begin_sum(world, values)

            World.begin_sum = slowly  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            end = time.thread_time() + self.each + self.sample * len(x)
            while time.thread_time() < end:
                pass
            time.sleep(self.pause)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)
