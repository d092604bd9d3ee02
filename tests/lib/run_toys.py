"""What users bring, as small as it can be: models, data sets, an objective, optimizers, hooks.

Tests name these classes on the command line as a user names their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tests.lib.tune_support import FullAt
from trainer.accumulate.base import Computed, GradientStrategy, divided
from trainer.core.micro_batch import Fields
from trainer.core.rows import Row, RunFacts, row
from trainer.objectives.base import Objective, Sums, logits_of
from trainer.plan.cut import Cut, IntArray, Layout, Plan
from trainer.tune.peak_bytes import PeakBytes

VOCABULARY = 16
LONGEST = 12


class Net(nn.Module):
    """Predicts the next token from this one and the mean of those before it."""

    def __init__(self, width: int = 8, dropout: float = 0.0, norm: str = "layer") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = norms[norm](width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    @classmethod
    def of(cls, width: int = 8) -> Net:
        """Make one, as `from_config` of a library does."""
        return cls(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = self.embed(input_ids)
        counts = torch.arange(1, tokens.shape[1] + 1, dtype=tokens.dtype)
        hidden = tokens + tokens.cumsum(1) / counts[:, None]
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.head(self.dropout(hidden))


class Whole(nn.Module):
    """Is made of parts that it is given."""

    def __init__(
        self, net: nn.Module, norm: Callable[[int], nn.Module], more: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.net, self.norm, self.more = net, norm(VOCABULARY), nn.Sequential(*more)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.more(self.norm(self.net(input_ids)))


class DoubleNet(Net):
    """Keeps its weights in double precision, so that only a wrong step differs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.double()


class DeepNet(Net):
    """Has a matrix between its embedding and its output layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.norm = nn.Sequential(self.norm, nn.Linear(width, width))


class LowNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


class LossNet(DoubleNet):
    """Computes its own loss, as Hugging Face heads do."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Any:
        logits = super().forward(input_ids)[:, :-1]
        targets = labels[:, 1:].flatten()
        terms = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return SimpleNamespace(loss=terms / num_items_in_batch)


class Noise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)


class NoisyNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = Noise()


class Rows:
    """Token rows of 2 to 12 tokens; every seventh has no label, so that weights differ."""

    draws_randomness = False

    def __init__(self, size: int = 44, unlabelled: Sequence[int] = ()) -> None:
        numbers = np.random.default_rng(3)
        self.lengths = numbers.integers(2, LONGEST + 1, size=size)
        self.tokens = [torch.from_numpy(numbers.integers(0, VOCABULARY, n)) for n in self.lengths]
        self.unlabelled = {*unlabelled, *range(5, size, 7)}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        ids = self.tokens[index]
        labels = torch.full_like(ids, -100) if index in self.unlabelled else ids
        return {"input_ids": ids, "labels": labels}


class Known(Rows):
    vocab_size = VOCABULARY


class Counting(Rows):
    """Rows that count up, which is soon learnt; those of some ids count down."""

    def __init__(self, downwards: Sequence[int] = ()) -> None:
        super().__init__(400)
        for i, length in enumerate(self.lengths):
            sign = -1 if i in downwards else 1
            self.tokens[i] = (i + sign * torch.arange(int(length))) % VOCABULARY


class Plain:
    """The least a data set can be: no lengths, no split, no collate; draws as it likes."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        ids = (torch.arange(2 + index % 7) + index) % VOCABULARY
        if torch.rand(()) < 0.5:
            ids = ids.flip(0)
        return {"input_ids": ids, "labels": ids}


class Split(Rows):
    """Brings a split, and joins its samples itself, on the left."""

    def __init__(self, split: str, size: int = 40) -> None:
        super().__init__(size if split == "train" else 9)
        self.split = split

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> Fields:
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
        return {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100)}


class Images:
    draws_randomness = False

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        pixels = torch.sin(torch.arange(3 * 6 * 6) * (1 + index % 4) / 9.0).reshape(3, 6, 6)
        return {"pixels": pixels, "labels": index % 4}


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(pixels.double())).relu().mean((2, 3)))


class Squared(Objective):
    """The squared distance of the logits from one-hot labels: a loss of one's own."""

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"squared": float((fields["labels"] >= 0).sum())}

    def sums(self, model: Any, fields: Fields) -> Sums:
        logits = logits_of(model({"input_ids": fields["input_ids"]}))
        labels = fields["labels"]
        goal = nn.functional.one_hot(labels.clamp(min=0), logits.shape[-1])
        terms = (logits - goal).square().sum(-1)[labels >= 0]
        return Sums(losses={"squared": terms.sum()})


class Descent(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Greedy(Descent):
    """Needs more memory for an update than there is, from some update on."""

    def __init__(self, params: Any, lr: float = 0.1, after: int = 0) -> None:
        super().__init__(params, lr)
        self.left = after

    def step(self, closure: Any = None) -> None:
        if not self.left:
            raise torch.OutOfMemoryError("injected into the update")
        self.left -= 1
        super().step()


class Watch:
    """A hook that keeps what it sees, and tries to meddle."""

    seen: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, word: str = "") -> None:
        self.word = word

    def on_step(self, entry: dict[str, Any]) -> None:
        self.seen.append((f"{self.word}step", dict(entry)))
        entry.clear()

    def on_eval(self, entry: dict[str, Any]) -> None:
        self.seen.append((f"{self.word}eval", entry))

    def on_checkpoint(self, entry: dict[str, Any]) -> None:
        self.seen.append((f"{self.word}checkpoint", entry))
        raise RuntimeError("a watcher's own fault")


class Stop:
    """A hook that asks this process to stop, as Ctrl-C or a scheduler does."""

    at: ClassVar[int | None] = None
    signal: ClassVar[signal.Signals] = signal.SIGTERM

    def on_step(self, entry: dict[str, Any]) -> None:
        if entry["step"] == self.at:
            os.kill(os.getpid(), self.signal)


class Slow:
    """A hook that leaves time for a signal."""

    def on_step(self, entry: dict[str, Any]) -> None:
        time.sleep(0.02)


class Pairs(Cut):
    """A cut of one's own: two neighbours in order of length share a micro-batch."""

    def __init__(self, size: int = 2) -> None:
        object.__setattr__(self, "size", size)

    def cut(self, lengths: IntArray, layout: Layout) -> Plan:
        order = np.argsort(lengths, kind="stable")
        slots = tuple(order[i : i + self.size] for i in range(0, len(order), self.size))
        padded = tuple(int(lengths[slot].max()) for slot in slots)
        return Plan(ranks=(slots,), lengths=lengths, padded_lengths=(padded,))

    def smaller(self, plan: Plan) -> Cut | None:
        return Pairs(self.size // 2) if self.size > 1 else None

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        words = f"{self.size} neighbours of {facts.world_size} rank"
        own = row("pairs", words, group="computed", neighbours=self.size)
        return [*super().describe(facts), own]


class Scaled(GradientStrategy):
    """A gradient strategy of one's own: the loss of `sum`, so many times."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        sums = objective.sums(model.call, micro_batch.fields)
        loss = self.scale * divided(sums.losses, divisors)
        loss.backward()
        return Computed(loss=loss)


class Cramped(Scaled):
    """Runs as on a device with so many bytes for tensors, from some step on."""

    def __init__(self, limit: int, after: int = 0) -> None:
        super().__init__()
        self.limit, self.after, self.calls = limit, after, 0

    def walk(self, *given, **how):
        self.calls += 1
        if self.calls <= self.after:
            return super().walk(*given, **how)
        with PeakBytes() as peak, FullAt(peak, self.limit):
            return super().walk(*given, **how)


class Put(Net):
    """Uses an operator that has no deterministic kernel, on a CPU either."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return torch.put(logits, torch.zeros(1, dtype=torch.long), logits.new_zeros(1))
