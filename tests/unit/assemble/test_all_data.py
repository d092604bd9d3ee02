"""`data.holdout=all`: every sample once, however a data set splits itself."""

import numpy as np
import pytest
import torch

from tests.lib.config_support import checked
from trainer.assemble.data_sets import open_data
from trainer.core.world import World

EVALUATED = {"command": "evaluate", "run": "any", "data.holdout": "all"}


class Halves:
    """Numbers, even ones to train on."""

    vocab_size = 64

    def __init__(self, split: str) -> None:
        self.numbers = list(range(split == "held_out", 9, 2))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int):
        return {"input_ids": torch.full((2 + self.numbers[i],), self.numbers[i])}


class Labelled(Halves):
    """Takes `split` as no more than a label."""

    def __init__(self, split: str) -> None:
        super().__init__("train")


class Numbered(Halves):
    """Numbers the samples of each side from 0, as files of their own."""

    @property
    def original_ids(self):
        return np.arange(len(self))


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        ({"data._target_": f"{__name__}.Halves"}, [2, 4, 6, 8, 10, 3, 5, 7, 9]),
        ({"data._target_": f"{__name__}.Halves", "data.split": "train"}, [2, 4, 6, 8, 10]),
        ({"data._target_": f"{__name__}.Labelled"}, [2, 4, 6, 8, 10]),
    ],
)
def test_every_sample_is_there_once(data, lengths):
    config = checked({**data, **EVALUATED}, "data=own")
    view = open_data(config, World()).train
    assert view.lengths[:].tolist() == lengths
    samples = [view.read(i, seed=0, epoch=0) for i in range(len(view))]
    assert [len(sample["input_ids"]) for sample in samples] == lengths
    assert view.facts.vocab_size == 64


def test_sides_that_number_their_samples_alike_give_each_an_id_of_its_own():
    config = checked({"data._target_": f"{__name__}.Numbered", **EVALUATED}, "data=own")
    view = open_data(config, World()).train
    assert view.original_ids(range(len(view))).tolist() == [*range(9)]
