"""Models and data of the wild that once misled predictions, timings or their cache."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.lib.tune_support import VOCABULARY, measured_peak, text, workload
from trainer.plan.memory import Shape
from trainer.report.metrics import METRICS_FILE, step_seconds_at
from trainer.tune.fake import CannotRunFake, predict_peak
from trainer.tune.predict import Predictor
from trainer.tune.ragged import look
from trainer.tune.speed import measure
from trainer.tune.tensors import PeakBytes
from trainer.tune.workload import Tiled


class Recurrent(nn.Module):
    """Layers whose kernel on a CPU keeps a workspace that its fake has none of."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.rnn = kind(32, 32, 2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(input_ids))[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_predicted_with_its_workspace(kind):
    work, shape = workload(Recurrent(kind), text(16)), Shape(8, 16)
    predict = Predictor(work, Shape(1, 16))
    measured = measured_peak(work, shape).peak_bytes
    assert predict(shape).peak_bytes == pytest.approx(measured, rel=0.05)
    if predict_peak(work, shape).peak_bytes < 0.9 * measured:
        assert "real probes" in predict.method
        assert "a fake forward holds" in predict.method


class Opposed:
    """Sources and targets of opposed lengths, and boxes of a number of their own."""

    lengths = np.arange(4, 24)

    def load(self, i: int) -> dict[str, Tensor]:
        source = int(self.lengths[i])
        return {
            "input_ids": torch.ones(1, source, dtype=torch.long),
            "mask": torch.ones(1, source, source),
            "decoder_input_ids": torch.ones(1, 30 - source, dtype=torch.long),
            "boxes": torch.ones(1, 0 if source == 23 else 3, 4),
        }


def test_a_dimension_with_a_length_of_its_own_takes_the_most_it_has_up_to_that_length():
    data = Opposed()
    dims = look(data.lengths, data.load)
    assert dims.sequence is not None
    assert dims.sequence["mask"] == {1, 2}
    fields = Tiled(data.load(19), 23, dims)(2, 10)
    assert {name: tuple(field.shape) for name, field in fields.items()} == {
        "input_ids": (2, 10),
        "mask": (2, 10, 10),
        "decoder_input_ids": (2, 26),
        "boxes": (2, 3, 4),
    }


class Grouped(nn.Module):
    """Asks for a kernel that refuses to run fake in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows = input_ids.flatten()[:, None].expand(-1, 8).to(self.weight.dtype)
        ends = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        return torch._grouped_mm(rows, self.weight, offs=ends)


def test_a_fake_run_that_fails_says_nothing_of_its_own(capfd):
    with pytest.raises(CannotRunFake, match="Expected"):
        predict_peak(workload(Grouped()), Shape(2, 8))
    assert not capfd.readouterr().err
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_sizes_are_compared_though_the_first_run_took_the_whole_budget():
    now, sizes = [0.0], [Shape(n, 1) for n in (1, 2, 4)]

    def prepare(shape: Shape):
        def run() -> None:
            now[0] += 5.0 if now[0] == 0.0 else 0.01 * shape.num_samples

        return run

    settings = (prepare, sizes, [], lambda _: 1.5, lambda: now[0])
    assert len(measure(*settings, patience_s=10.0).seconds) >= 2
    now[0] = 0.0
    assert len(measure(*settings).seconds) == 1


def test_a_resumed_run_tells_the_time_that_its_steps_took(tmp_path):
    lines = [f'{{"step": {step}, "seconds": {seconds}}}' for step, seconds in enumerate(
        [9.0, 0.5, 0.7, 0.6, 40.0], start=1
    )]  # fmt: skip
    lines.insert(3, '{"step": 3, "eval_loss": 1.0, "eval_seconds": 3.0}')
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    assert step_seconds_at(tmp_path, 4) == pytest.approx(0.65)
    assert step_seconds_at(tmp_path, 0) is None


LAYOUTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_tensor_within_a_forward_is_counted_by_its_parts(layout):
    dense, peak = torch.eye(32), PeakBytes()
    with peak:
        kept = dense.to_sparse(layout=layout)
        peak.reset()
    parts = [getattr(kept, name)() for name in LAYOUTS[layout]]
    assert peak.estimate.activations == sum(p.untyped_storage().nbytes() for p in parts)
