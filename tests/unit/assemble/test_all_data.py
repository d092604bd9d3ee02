"""`data.holdout=all`: every sample once, however a data set splits itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lib.cli_support import make_own_folder, prepared
from trainer.assemble.data_sets import open_data
from trainer.core.world import World

HERE = "tests.unit.assemble.test_all_data"


class Halves:
    """Numbers, even ones to train on."""

    vocab_size = 64

    def __init__(self, split: str, size: int = 9) -> None:
        self.numbers = list(range(split == "held_out", size, 2))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int):
        return {"input_ids": torch.full((2 + self.numbers[i],), self.numbers[i])}


class Labelled(Halves):
    """Takes `split` as no more than a label."""

    def __init__(self, split: str) -> None:
        super().__init__("train")


class Plain(Halves):
    """Knows of no split."""

    def __init__(self) -> None:
        super().__init__("train")


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (f"data._target_={HERE}.Halves", [2, 4, 6, 8, 10, 3, 5, 7, 9]),
        (f"data._target_={HERE}.Labelled", [2, 4, 6, 8, 10]),
        (f"data._target_={HERE}.Plain", [2, 4, 6, 8, 10]),
        (f"data._target_={HERE}.Halves data.split=train", [2, 4, 6, 8, 10]),
        ("data=text data.path=texts.jsonl", [5, 6, 7]),
        ("data=tokens data.path=tokens data.max_length=4 model.vocab_size=8", [4, 3, 4, 4, 2]),
    ],
)
def test_every_sample_is_there_once(data, lengths, tmp_path, monkeypatch):
    make_own_folder(tmp_path, monkeypatch)
    Path("texts.jsonl").write_text("".join(f'{{"text": "{"a" * n}"}}\n' for n in (3, 4, 5)))
    Path("tokens").mkdir()
    for name, count in (("train", 6), ("val", 8)):
        np.arange(count, dtype="<u2").tofile(f"tokens/{name}.bin")
    run = prepared("data=text data.path=texts.jsonl")  # any that evaluate can be typed over
    config = run.config.model_copy(
        update={"data": prepared(data).config.data, "command": "evaluate"}
    )
    params = {**config.data.params, "holdout": "all"}
    config = config.model_copy(update={"data": config.data.model_copy(update={"params": params})})
    view = open_data(config, World()).train
    assert view.lengths[:].tolist() == lengths
    samples = [view.read(i, seed=0, epoch=0) for i in range(len(view))]
    assert [len(sample["input_ids"]) for sample in samples] == lengths
    known = {"data=text": 258, "data=tokens": None}.get(data.split()[0], Halves.vocab_size)
    assert view.facts.vocab_size == known
