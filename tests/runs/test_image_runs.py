"""Images are learned from the command line: digits, models for them, and classes of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lib.nightly import nightly
from tests.lib.run_support import read_json, shell
from trainer import train

MINE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.body(x)


class Rings:
    draws_randomness = False

    def __len__(self):
        return 128

    def __getitem__(self, i):
        noise = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(i))
        return {"image": noise + i % 2, "labels": i % 2}
"""
QUICK = ["wandb.mode=disabled", "checkpoint.every=null", "eval.every=null", "log.every=100"]


@pytest.fixture(autouse=True)
def classes(own_folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("painting.py").write_text(MINE)


@pytest.mark.parametrize(
    "line", ["model.width=16 batch.global=128 optimizer.lr=1e-2 steps=60", nightly("accum=auto")]
)
def test_digits_are_learned_by_a_small_resnet(line):
    run = train(["data=digits", "model=resnet", *line.split(), *QUICK])
    assert run.result["metrics"]["accuracy"] >= 0.97
    plan = read_json(run.folder / "plan.json")
    assert plan["num_held_out"] == 359
    assert plan["num_samples"] == 1438


@pytest.mark.parametrize(
    "line",
    [
        "data=digits model._target_=painting.Net batch.global=512",
        "data._target_=painting.Rings model=vit model.num_classes=2 model.depth=1 batch.global=32",
    ],
)
def test_models_and_images_of_one_s_own_meet_the_built_in_ones_whatever_their_names(line):
    run = train([*line.split(), "optimizer.lr=2e-2", "steps=12", *QUICK])
    assert run.result["metrics"]["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("data=digits", "model.vocab_size: the samples are images, without tokens; type model=res"),
        (
            "model=resnet data=text data.path=painting.py",
            "model.channels=null: the samples have",
        ),
        ("model=vit data=digits model.width=30", "model.width=30: must be a multiple of 4"),
    ],
)
def test_models_and_data_of_different_kinds_are_one_line(line, fault, capsys):
    assert shell(line) == 2
    assert fault in capsys.readouterr().err
