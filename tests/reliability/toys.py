"""Make the runs of the harnesses of rows and a network that fail where they are told to.

A fault belongs to a sample, so it strikes whenever that sample is trained on: in the first run, in
its replay and after every resumption. What an undisturbed run does with it is thus well defined.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

VOCABULARY = 16

FAULTS = {
    "loss:nan": float("nan"),
    "loss:inf": float("inf"),
    "loss:-inf": float("-inf"),
    "gradient:nan": float("nan"),
    "gradient:inf": float("inf"),
    "gradient:-inf": float("-inf"),
    "oom": 0.0,
    "unlabelled": 0.0,
}

after_step: Callable[[int], None] | None = None
"""Called in the process that trains, after each step and before its boundary."""

on_read: Callable[[str, int], None] | None = None
"""Called with split and index when a row is read."""

on_call: Callable[[], None] | None = None
"""Called when the network is."""


class Rows:
    """Token rows of 2 to 7 tokens; `faults` lists what is wrong with which, as `3:loss:nan`."""

    draws_randomness = False

    def __init__(
        self, size: int = 23, split: str = "train", faults: Sequence[str] = (), seed: int = 0
    ) -> None:
        self.split = split
        self.first = 0 if split == "train" else 1000
        count = size if split == "train" else 6
        self.lengths = (np.arange(count) * 5 + self.first) % 6 + 2
        self.faults: dict[int, str] = {}
        if split == "train":
            self.faults = {int(f.partition(":")[0]): f.partition(":")[2] for f in faults}
        self.has_faults = bool(faults) and split == "train"

    @property
    def fingerprint(self) -> str:
        return f"{len(self)} rows from {self.first}, {sorted(self.faults.items())}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if on_read is not None:
            on_read(self.split, index)
        key = zlib.crc32(f"{self.first + index}".encode())
        length = int(self.lengths[index])
        ids = torch.tensor([(key >> (3 * place)) % VOCABULARY for place in range(length)])
        fault = self.faults.get(index)
        labels = torch.full_like(ids, -100) if fault == "unlabelled" else ids
        sample = {"input_ids": ids, "labels": labels}
        if self.has_faults:
            known = -1 if fault is None else list(FAULTS).index(fault)
            sample["fault"] = torch.tensor(known)
        return sample


class DrawnRows(Rows):
    """Rows that are augmented at random."""

    draws_randomness = True

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = dict(super().__getitem__(index))
        ids = sample["input_ids"].clone()
        ids[0] = torch.randint(VOCABULARY, ()) if np.random.rand() < 0.5 else ids[0]
        return sample | {"input_ids": ids, "labels": ids}


class OwnDrawnRows(DrawnRows):
    """Rows that are augmented by generators of their own, as libraries do."""

    def __init__(self, split: str = "train") -> None:
        super().__init__(split=split)
        self.transforms = [{"rng": np.random.default_rng(0)}]

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = dict(super().__getitem__(index))
        ids = sample["input_ids"].clone()
        ids[-1] = int(self.transforms[0]["rng"].integers(VOCABULARY))
        return sample | {"input_ids": ids, "labels": ids}


class Net(nn.Module):
    """A small language model with a buffer that counts its calls."""

    def __init__(
        self,
        width: int = 8,
        dropout: float = 0.0,
        norm: bool = False,
        tied: bool = False,
        frozen: bool = False,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.requires_grad_(requires_grad=False)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def inner(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.flatten(0, 1)).view_as(hidden)

    def forward(self, input_ids: Tensor, fault: Tensor | None = None) -> Tensor:
        if on_call is not None:
            on_call()
        logits = self.head(self.dropout(self.inner(self.embed(input_ids))))
        if self.training:
            self.calls += 1
            if fault is not None:
                logits = struck(logits, fault)
        return logits


class _Poisoned(torch.autograd.Function):
    """Passes values on and replaces their gradient."""

    @staticmethod
    def forward(context: Any, values: Tensor, poison: float) -> Tensor:
        context.poison = poison
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, context.poison), None


def struck(logits: Tensor, fault: Tensor) -> Tensor:
    names = [list(FAULTS)[int(code)] for code in fault if code >= 0]
    for name in names:
        if name == "oom" and len(fault) > 1:
            raise torch.OutOfMemoryError("injected")
        kind = name.partition(":")[0]
        if kind == "loss":
            logits = logits + FAULTS[name]
        elif kind == "gradient":
            logits = _Poisoned.apply(logits, FAULTS[name])
    return logits


class Watch:
    """A hook that hands every step to `after_step`."""

    def on_step(self, entry: Mapping[str, Any]) -> None:
        if after_step is not None:
            after_step(entry["step"])
