"""What a fake run of a few samples shows: the fields that nothing reads."""

import pytest
import torch
from torch import nn

from tests.reliability import lab
from trainer.assemble.build import assemble
from trainer.assemble.counts import count_run, unread_fields
from trainer.assemble.workload import workload_of
from trainer.core.world import World
from trainer.objectives.base import Objective, Sums


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


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 4), nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        hidden = self.norm(hidden[:, 0])[:, None] + hidden
        return hidden @ self.embed.weight.T


class Swallowing(Net):
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


def warnings_of(data, model, *more):
    own = [f"{k}._target_=tests.unit.assemble.test_counts.{v}" for k, v in (("data", data), model)]
    config = lab.config(*own, "command=plan", *more)
    run = assemble(config, World())
    return unread_fields(run, count_run(run, workload_of(run)))


@pytest.mark.parametrize("model", ["Net", "Swallowing"])
@pytest.mark.parametrize("data", ["Masked", "Collated"])
def test_a_field_that_nothing_reads_is_named(data, model):
    (line,) = warnings_of(data, ("model", model))
    assert line.startswith(f"data: loss_mask of the samples is read by neither forward of {model}")


def test_a_field_that_model_or_objective_reads_is_not_named():
    objective = "objective._target_=tests.unit.assemble.test_counts.MaskedLoss"
    assert warnings_of("Masked", ("model", "Weighing")) == []
    assert warnings_of("Masked", ("model", "Swallowing"), objective) == []
    assert len(warnings_of("Masked", ("model", "Net"), "model.norm=true", "batchnorm=micro")) == 1
