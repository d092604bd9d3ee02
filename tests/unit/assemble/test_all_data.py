"""`data.holdout=all`: every sample once, however a data set splits itself."""

from pathlib import Path

import pytest
import torch

from tests.lib.cli_support import make_own_folder, prepared
from trainer.assemble.data_sets import open_data
from trainer.core.world import World


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


@pytest.mark.parametrize(
    ("data", "lengths", "vocab_size"),
    [
        (f"data._target_={__name__}.Halves", [2, 4, 6, 8, 10, 3, 5, 7, 9], 64),
        (f"data._target_={__name__}.Labelled", [2, 4, 6, 8, 10], 64),
        (f"data._target_={__name__}.Halves data.split=train", [2, 4, 6, 8, 10], 64),
        ("data=text data.path=texts.jsonl", [5, 6, 7], 258),
    ],
)
def test_every_sample_is_there_once(data, lengths, vocab_size, tmp_path, monkeypatch):
    make_own_folder(tmp_path, monkeypatch)
    Path("texts.jsonl").write_text("".join(f'{{"text": "{"a" * n}"}}\n' for n in (3, 4, 5)))
    config = prepared(data).config
    params = {**config.data.params, "holdout": "all"}
    of_all = {"command": "evaluate", "data": config.data.model_copy(update={"params": params})}
    view = open_data(config.model_copy(update=of_all), World()).train
    assert view.lengths[:].tolist() == lengths
    samples = [view.read(i, seed=0, epoch=0) for i in range(len(view))]
    assert [len(sample["input_ids"]) for sample in samples] == lengths
    assert view.facts.vocab_size == vocab_size
