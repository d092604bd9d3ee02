"""What a fake run of a few samples shows: the fields that nothing reads."""

import pytest
import torch

from tests.lib import run_toys
from tests.lib.run_support import go, read_json
from trainer.objectives.base import Objective, Sums

pytestmark = pytest.mark.usefixtures("own_folder")


class Masked:
    """Brings a mask that not everybody reads."""

    def __len__(self):
        return 9

    def __getitem__(self, i):
        ids = torch.arange(3 + i % 4)
        return {"input_ids": ids, "labels": ids, "loss_mask": (ids > 1).float()}


class Collated(Masked):
    lengths = [3] * 9

    def __getitem__(self, i):
        return {"input_ids": torch.arange(3)}

    def collate(self, samples):
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids, "loss_mask": ids.float()}


class Swallowing(run_toys.Net):
    """Takes whatever there is, as models of libraries do."""

    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids)


class Weighing(Swallowing):
    """Reads the mask, and only in training."""

    def forward(self, input_ids, **kwargs):
        logits = super().forward(input_ids)
        return logits * kwargs["loss_mask"][..., None] if self.training else logits


class MaskedLoss(Objective):
    """An objective that hands on a copy of all fields, and reads the mask itself."""

    def weights(self, fields):
        return {"entropy": float(len(fields["labels"]))}

    def sums(self, model, fields):
        logits = model({name: field for name, field in fields.items() if name != "labels"})
        picked = logits.log_softmax(-1).gather(-1, fields["labels"].clamp(min=0)[..., None])
        return Sums(losses={"entropy": -(picked[..., 0] * fields["loss_mask"]).sum()})


@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("data.Masked model.Swallowing", True),
        ("data.Masked model.Swallowing batchnorm=micro model.norm=batch", True),
        ("data.Collated", True),
        ("data.Masked model.Weighing", False),
        ("data.Masked model.Swallowing objective.MaskedLoss", False),
    ],
)
def test_a_field_that_neither_model_nor_objective_reads_is_named(line, is_named):
    for key in ("data", "model", "objective"):
        line = line.replace(f"{key}.", f"{key}._target_={__name__}.", 1)
    plan = read_json(go(f"command=plan {line}").folder / "plan.json")
    text = "data: loss_mask of the samples is read by neither forward of "
    found = [warning for warning in plan["warnings"] if warning.startswith(text)]
    assert len(found) == is_named
