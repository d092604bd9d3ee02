"""Models and data that once misled the tuner, by import path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainer.objectives.base import Objective, Sums

WIDTH = 32


class Values:
    """Rows of a fixed size, with classes."""

    def __init__(self, split: str = "train") -> None:
        self.x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": torch.tensor(index % 4)}


class ClassLoss(Objective):
    def weights(self, fields):
        return {"loss": float(len(fields["labels"]))}

    def sums(self, model, fields):
        logits = model({"x": fields["x"]})
        return Sums(losses={"loss": F.cross_entropy(logits, fields["labels"], reduction="sum")})


class Normalised(nn.Module):
    """Batch statistics of single values, which one sample has none of."""

    def __init__(self, *, is_module: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if is_module else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.norm is None:
            return self.b(F.batch_norm(h, None, None, training=self.training))
        return self.b(self.norm(h))


class Frames:
    """Ragged frames with as many features as the longest sample has frames."""

    def __init__(self, split: str = "train") -> None:
        self.lengths = [WIDTH, *range(4, WIDTH - 1)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index]
        return {"frames": torch.ones(length, WIDTH), "labels": torch.arange(length) % 5}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        frames = pad_sequence([sample["frames"] for sample in samples], batch_first=True)
        labels = [sample["labels"] for sample in samples]
        return {"frames": frames, "labels": pad_sequence(labels, True, -100)}


class FrameNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(frames)


class FrameLoss(Objective):
    def weights(self, fields):
        return {"ce": float((fields["labels"] != -100).sum())}

    def sums(self, model, fields):
        logits = model({"frames": fields["frames"]}).flatten(0, 1)
        labels = fields["labels"].flatten()
        return Sums(losses={"ce": F.cross_entropy(logits, labels, reduction="sum")})
