"""Models and data of users that once misled the tuner."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.run_support import only_run, read_json
from tests.lib.tune_support import VOCABULARY, measured_peak, text, workload
from trainer import train
from trainer.plan.memory import Shape
from trainer.tune.predict import predict_peak
from trainer.tune.workload import Tiled, measured_dims

OWN = "tests.unit.tune.test_workload"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))


def planned(*settings: str) -> dict:
    train(["command=plan", "wandb.mode=disabled", "device=cpu", "steps=2", *settings])
    return read_json(only_run() / "plan.json")


class Normalised(nn.Module):
    """Batch statistics of single values, which one sample has none of."""

    def __init__(self, *, is_module: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if is_module else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.norm is None:
            return self.b(F.batch_norm(h, None, None, training=self.training))
        return self.b(self.norm(h))


VALUES = ("data._target_=tests.lib.faulty.Rows", "objective=classify", "batch.global=16")
STATED = ("accum=fixed", "accum.micro=8", "batchnorm=micro")


@pytest.mark.parametrize("is_module", [True, False])
def test_a_model_that_needs_several_samples_is_predicted_at_the_stated_count(is_module):
    plan = planned(
        *VALUES, *STATED, f"model._target_={OWN}.Normalised", f"+model.is_module={is_module}"
    )
    assert plan["predicted_peak_bytes"] > 0


def test_a_stated_cut_that_cannot_be_predicted_is_planned_with_a_note(monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("no such shape")

    monkeypatch.setattr("trainer.tune.tuner.Predictor", fail)
    plan = planned(*VALUES, *STATED, f"model._target_={OWN}.Normalised")
    assert plan["predicted_peak_bytes"] is None
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "memory not predicted: ValueError: no such shape" in shown


class Tabled(nn.Module):
    def __init__(self, num_bytes: int, *, moves: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.moves = moves
        self.register_buffer("table", torch.zeros(num_bytes // 4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.moves:
            self.table.add_(1.0)
        return self.head(self.embedding(input_ids)) + self.table[0]


@pytest.mark.parametrize(("num_bytes", "moves"), [(2**14, False), (2**24, True)])
def test_the_copies_a_step_keeps_of_buffers_are_predicted(num_bytes, moves):
    model = Tabled(num_bytes, moves=moves)
    work = workload(model, text())
    predicted = predict_peak(work, Shape(2, 8)).peak_bytes
    assert predicted == pytest.approx(measured_peak(work, Shape(2, 8)).peak_bytes, rel=0.03)


def test_a_shape_is_made_of_the_longest_whole_sample_that_it_holds_and_then_of_its_last_token():
    lengths = np.array([3, 5, 9])
    samples = [{"input_ids": torch.arange(1, n + 1)[None]} for n in lengths]
    dims = measured_dims(lengths, lambda i: samples[i])
    tiled = Tiled(samples[-1], 9, dims)
    assert tiled.shortest == 3
    for length, expected in ((3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 5]), (9, [*range(1, 10)])):
        assert tiled(2, length)["input_ids"].tolist() == [expected] * 2
