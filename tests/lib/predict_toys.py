"""A predictor made by hand, and records of every kind that it meets."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.lib.support import replicated
from trainer.core.world import World
from trainer.data.loader import Loader
from trainer.data.samples import DataRecord
from trainer.features.predict.predictor import RecordPredictor
from trainer.objectives.base import Objective
from trainer.objectives.classify import Classify
from trainer.objectives.text_output import TextOutput

NAMES = ("odd", "even")


class Sums(nn.Module):
    """Scores whether the sum of some tokens is odd or even, and notes the shapes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen.append(tuple(input_ids.shape))
        is_odd = (input_ids.sum(1) % 2).double()
        return torch.stack([is_odd, 1 - is_odd], dim=1) * 3


class Tokens:
    """Tokens of 1 to 3, of which the one of sum 7 cannot be read; without labels."""

    draws_randomness = False
    rows = ([1, 2], [3], [2, 2], [1, 1, 1], [4], [3, 4], [2])

    def __init__(self) -> None:
        self.lengths = [len(row) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Mapping[str, Tensor]:
        if sum(self.rows[i]) == 7:
            raise ValueError("seven")
        return {"input_ids": torch.tensor(self.rows[i])}

    def name_of(self, i: int) -> str:
        return f"row {i}"


class Documents(Tokens):
    """The same in records, of which one was divided, and one is no sample."""

    def predicted_records(self) -> Iterator[DataRecord]:
        yield DataRecord(number=0, place="a:1", samples=(0, 1))
        yield DataRecord(number=1, place="a:3", why_none="without text")


class Asked(Tokens):
    """A record with a text and choices of its own."""

    def predicted_records(self) -> Iterator[DataRecord]:
        yield DataRecord(number=2, samples=(2,), classes=("x", "y"), text="so  it is")


def predictor_of(
    world: World | None = None,
    data: Any = None,
    module: nn.Module | None = None,
    objective: Objective | None = None,
) -> RecordPredictor:
    """Put a predictor together."""
    world = world or World()
    return RecordPredictor(
        model=replicated(module or Sums(), world),
        objective=objective or Classify(),
        loader=Loader(data or Tokens(), num_workers=0, seed=0),
        world=world,
        names=NAMES,
        most_tokens=4,
        text=TextOutput(),
    )


def lines_of(world: World) -> list[dict[str, Any]]:
    """Predict the toy data."""
    return [*predictor_of(world).lines()]
