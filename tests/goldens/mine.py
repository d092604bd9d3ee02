"""Classes of a user's own that the goldens name, kept to what `docs/how-to/own` promises now."""

import pathlib
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from trainer.accumulate.base import Computed, GradientStrategy, divided
from trainer.models.transform import ModelTransform
from trainer.objectives.base import Objective, Sums
from trainer.parallel.sync import SyncPolicy
from trainer.plan.batch_size import BatchSize
from trainer.plan.cut import Cut, Plan


class Net(nn.Module):  # called with the fields its forward names; gives logits
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(258, width)
        self.head = nn.Linear(width, 258)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


class Lines:  # __len__ and __getitem__; `lengths`, `collate`, `split` are optional
    def __init__(self, path: str) -> None:
        with pathlib.Path(path).open("rb") as file:
            self.lines = [line for line in file if len(line) > 1]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int):
        ids = torch.tensor(list(self.lines[i]))
        return {"input_ids": ids, "labels": ids}  # padded on the right for you: 0 and -100


class Watch:  # a read-only hook
    def on_step(self, step: dict) -> None:
        print(step["step"], step["loss"])


class Rings:  # images and one class each, for objective=classify
    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int):
        noise = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(i))
        return {"image": noise + i % 2, "labels": i % 2}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))

    def forward(self, image):
        return self.body(image)


class Brier(Objective):  # sums over samples, and what the whole step's are divided by
    def weights(self, fields):
        return {"brier": float(len(fields["labels"]))}

    def sums(self, model, fields):
        chances = model(fields).softmax(-1)
        truth = nn.functional.one_hot(fields["labels"], chances.shape[-1])
        return Sums(losses={"brier": (chances - truth).square().sum()})


@dataclass(frozen=True, kw_only=True)
class Pairs(Cut):  # two samples at a time, in sample order, on one rank
    def cut(self, lengths, layout):
        slots = tuple(np.arange(i, min(i + 2, len(lengths))) for i in range(0, len(lengths), 2))
        longest = tuple(int(lengths[slot].max()) for slot in slots)
        return Plan(ranks=(slots,), lengths=lengths, padded_lengths=(longest,))

    def smaller(self, plan):  # what to do when memory runs out: nothing finer
        return None


class Strategy(GradientStrategy):  # what the built-in `sum` does
    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        sums = objective.sums(model.call, micro_batch.fields)
        loss = divided(sums.losses, divisors)
        loss.backward()
        return Computed(loss=loss, metrics=sums.metrics)


class Adapted(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class LowRank(ModelTransform):
    def __init__(self, rank: int = 4) -> None:
        self.rank = rank

    def __call__(self, model):
        model.requires_grad_(False)
        model.head = Adapted(model.head, self.rank)
        return model


class Ema:  # a part with state
    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.updates = decay, 0

    def begin(self, module):
        self.module = module
        self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}

    def after_update(self, step):
        self.updates += 1
        for name, parameter in self.module.named_parameters():
            self.weights[name].lerp_(parameter, 1 - self.decay)

    def state(self):
        return {"weights": self.weights, "updates": self.updates}

    def load(self, state):
        self.weights, self.updates = state["weights"], state["updates"]

    def metrics(self):
        return {"ema_updates": self.updates, "ema_norm": self.weights["head.bias"].norm()}


@dataclass(frozen=True, kw_only=True)
class Ramp(BatchSize):
    first: int = 8
    first_steps: int = 2

    def size(self, at):
        return self.first if at.step < self.first_steps else self.global_batch

    def lr_factor(self, at):
        return self.size(at) / self.global_batch


class Halves(SyncPolicy):  # reduces in every second micro-batch
    name = "halves"
    lockstep = True

    def reduction(self, index, *, is_last):
        return "across" if index % 2 else "none"


class Parted:  # brings its own held-out part, built once
    def __init__(self, path: str) -> None:
        self.whole = Lines(path)

    def splits(self):
        lines = self.whole
        return {
            "train": torch.utils.data.Subset(lines, range(100)),
            "held_out": torch.utils.data.Subset(lines, range(100, len(lines))),
        }


class Slow:  # gives a signal time to come between two steps
    def on_step(self, step: dict) -> None:
        time.sleep(0.15)


class Raising(Lines):
    def __getitem__(self, i: int):
        if i == 7:
            raise ValueError("sample 7 is broken")
        return super().__getitem__(i)


class Towers(nn.Module):  # two embeddings of each sample
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(6, 4), nn.Linear(8, 4)

    def forward(self, query, document):
        return {"query": self.query(query), "document": self.document(document)}


class Couples:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int):
        noise = torch.randn(14, generator=torch.Generator().manual_seed(i))
        return {"query": noise[:6], "document": noise[6:] + noise[0]}
