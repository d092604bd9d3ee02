"""A data set of two files gives its parts by name, built once, and facts that a model takes."""

from pathlib import Path

import pytest

from tests.lib.run_support import entries, go, read_json

CODE = """
from pathlib import Path

import torch
from torch import nn


class Numbers(list):
    vocab_size, num_classes = 11, 11

    def __getitem__(self, i):
        return {"input_ids": torch.tensor([super().__getitem__(i) % 11] * 3), "labels": i % 11}


class Source(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        with Path("built.txt").open("a") as file:
            file.write("once\\n")

    def splits(self):
        return {"other": Numbers(range(5)), "dev": Numbers(range(100, 109)), "train": self}


class Net(nn.Sequential):
    def __init__(self, vocab_size: int, num_classes: int) -> None:
        super().__init__(nn.Embedding(vocab_size, 4), nn.Linear(4, num_classes))

    def forward(self, input_ids):
        return super().forward(input_ids).mean(1)
"""


@pytest.mark.usefixtures("own_folder")
def test_a_source_of_two_files_is_built_once_and_gives_parts_and_facts():
    Path("source_of_two.py").write_text(CODE)
    Path("my_conf/data").mkdir(parents=True)
    Path("my_conf/data/two.yaml").write_text("_target_: source_of_two.Source\nsize: 40\n")
    line = "data=two data.size=30 model._target_=source_of_two.Net objective=classify steps=2"
    run = go(line, config_dir="my_conf")
    assert Path("built.txt").read_text() == "once\n"
    splits = read_json(run.folder / "splits.json")
    assert splits["rule"] == "parts train and dev of the data set"
    assert (splits["num_training"], splits["num_held_out"]) == (30, 9)
    assert run.result["eval_loss"] > 0
    assert all(i < 30 for entry in entries(run, "samples.jsonl") for i in entry["ids"])
