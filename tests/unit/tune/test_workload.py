"""Models and data of users that once misled the tuner."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.run_support import go, read_json
from tests.lib.tune_support import VOCABULARY, measured_peak, workload
from trainer.plan.memory import Shape
from trainer.tune.predict import predict_peak
from trainer.tune.workload import Tiled, measured_dims

pytestmark = pytest.mark.usefixtures("own_folder")


class Normalised(nn.Module):
    """Batch statistics of single values, which one sample has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.batch_norm(self.a(x), None, None, training=self.training))


def planned() -> dict:
    line = f"model._target_={__name__}.Normalised data._target_=tests.lib.faulty.Rows"
    return read_json(go(f"command=plan {line} objective=classify").folder / "plan.json")


def test_a_model_that_needs_several_samples_is_predicted_at_the_stated_count():
    assert planned()["predicted_peak_bytes"] > 0


def test_a_stated_cut_that_cannot_be_predicted_is_planned_with_a_note(monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("no such shape")

    monkeypatch.setenv("TRAIN_CACHE", "cache")
    monkeypatch.setattr("trainer.tune.tuner.Predictor", fail)
    assert planned()["predicted_peak_bytes"] is None
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "memory not predicted, as a trial of the model failed: no such shape" in shown


class Tabled(nn.Module):
    """Moves a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.register_buffer("table", torch.zeros(2**20))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.table.add_(1.0)
        return self.head(self.embedding(input_ids)) + self.table[0]


def test_the_copies_a_step_keeps_of_buffers_are_predicted():
    work = workload(Tabled())
    predicted = predict_peak(work, Shape(2, 8)).peak_bytes
    assert predicted == pytest.approx(measured_peak(work, Shape(2, 8)).peak_bytes, rel=0.03)


def test_a_shape_is_made_of_the_longest_whole_sample_that_it_holds_and_then_of_its_last_token():
    lengths = np.array([3, 5, 9])
    samples = [{"input_ids": torch.arange(1, n + 1)[None]} for n in lengths]
    tiled = Tiled(samples[-1], 9, measured_dims(lengths, lambda i: samples[i]))
    assert tiled.shortest == 3
    for length, expected in ((3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 5]), (9, [*range(1, 10)])):
        assert tiled(2, length)["input_ids"].tolist() == [expected] * 2
