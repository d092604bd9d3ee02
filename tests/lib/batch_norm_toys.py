"""Images of a few sorts, and a net with BatchNorm over every shape of input."""

from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum

SORTS = 3


class Pictures:
    """Pictures of 2 x 5 x 5, of which each sort has another mean and spread."""

    draws_randomness = False

    def __init__(self, size: int = 44) -> None:
        numbers = np.random.default_rng(1)
        self.sorts = numbers.integers(0, SORTS, size)
        noise = numbers.standard_normal((size, 2, 5, 5))
        self.pictures = torch.from_numpy(noise * (1 + self.sorts)[:, None, None, None] + 5)

    def __len__(self) -> int:
        return len(self.sorts)

    def __getitem__(self, i: int):
        return {"picture": self.pictures[i], "labels": int(self.sorts[i])}


class Convolved(nn.Module):
    """Normalises `(n, c, h, w)`, `(n, c, d, h, w)`, `(n, c, l)`, `(n l, c)` and `(n, c)`."""

    def __init__(self, single: bool = False, recomputes: bool = False, tracks: bool = True) -> None:
        super().__init__()
        self.first, how = nn.Conv2d(2, 4, 3), {"track_running_stats": tracks}
        self.norm, self.deep = nn.BatchNorm2d(4, **how), nn.BatchNorm3d(4, **how)
        self.line, self.rows = nn.BatchNorm1d(4, **how), nn.BatchNorm1d(4, **how)
        self.flat, self.head = nn.BatchNorm1d(36, momentum=None, **how), nn.Linear(36, SORTS)
        self.recomputes, self.dtype = recomputes, torch.float32 if single else torch.float64
        self.to(self.dtype)

    def body(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).sin()
        x = self.deep(x[:, :, None])[:, :, 0].flatten(2)
        x = self.line(x + 0.3 * x**2).cos().transpose(1, 2)
        return self.rows(x.flatten(0, 1)).view_as(x).sin()

    def forward(self, picture: Tensor) -> Tensor:
        x = picture.to(self.dtype)
        x = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return self.head(self.flat(x.flatten(1)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)) for _ in "123"
        )
        self.head = nn.Linear(50, SORTS)
        self.double()

    def forward(self, picture: Tensor) -> Tensor:
        for block in self.blocks:
            picture = picture + block(picture).sin()
        return self.head(picture.flatten(1))


class Counting(Convolved):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, picture: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(picture)


class Looking(Convolved):
    """Counts the forwards of its evaluations."""

    def __init__(self, tracks: bool = True) -> None:
        super().__init__(tracks=tracks)
        self.register_buffer("looks", torch.zeros(()))

    def forward(self, picture: Tensor) -> Tensor:
        self.looks += not self.training
        return super().forward(picture)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(50, SORTS)
        self.double()

    def forward(self, picture: Tensor) -> Tensor:
        return self.head(picture.flatten(1))


class Poor(GradientStrategy):
    """Runs out of memory behind its second micro-batch, once."""

    def __init__(self) -> None:
        self.calls = count(1)

    def micro_batch(self, *given):
        found = Sum().micro_batch(*given)
        if next(self.calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return found


class Odd(GradientStrategy):
    """Computes a loss that is not a number."""

    def micro_batch(self, *given):
        found = Sum().micro_batch(*given)
        return replace(found, loss=found.loss * float("nan"))
