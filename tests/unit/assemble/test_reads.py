"""What a run reads of its samples, and whether they change, shows before the first step."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from tests.reliability import lab
from trainer.assemble.components import assemble
from trainer.assemble.reads import check_reads
from trainer.core.errors import DataError
from trainer.core.world import World
from trainer.objectives.base import Objective, Sums

GENERATOR = np.random.default_rng(0)


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
    own = [f"{k}._target_=tests.unit.assemble.test_reads.{v}" for k, v in (("data", data), model)]
    config = lab.config(*own, "command=plan", *more)
    return check_reads(assemble(config, World()))


@pytest.mark.parametrize("model", ["Net", "Swallowing"])
@pytest.mark.parametrize("data", ["Masked", "Collated"])
def test_a_field_that_nothing_reads_is_named(data, model):
    (line,) = warnings_of(data, ("model", model))
    assert line.startswith(f"data: loss_mask of the samples is read by neither forward of {model}")


def test_a_field_that_model_or_objective_reads_is_not_named():
    objective = "objective._target_=tests.unit.assemble.test_reads.MaskedLoss"
    assert warnings_of("Masked", ("model", "Weighing")) == []
    assert warnings_of("Masked", ("model", "Swallowing"), objective) == []
    assert len(warnings_of("Masked", ("model", "Net"), "model.norm=true", "batchnorm=micro")) == 1


class Plain(Masked):
    """Draws from a generator that is at none of its attributes."""

    def __getitem__(self, i):
        ids = torch.from_numpy(GENERATOR.integers(0, 9, 3 + i % 4))
        return {"input_ids": ids, "labels": ids}


class Denying(Plain):
    draws_randomness = False

    def __getitem__(self, i):
        ids = torch.randint(9, (3 + i % 4,))
        return {"input_ids": ids, "labels": ids}


class Tied(Plain):
    def __init__(self):
        self.transforms = [{"rng": np.random.default_rng(0)}]

    def __getitem__(self, i):
        ids = torch.from_numpy(self.transforms[0]["rng"].integers(0, 9, 3 + i % 4))
        return {"input_ids": ids, "labels": ids}


class Growing(Plain):
    def __getitem__(self, i):
        ids = torch.arange(int(torch.randint(3, 9, ())))
        return {"input_ids": ids, "labels": ids}


def test_draws_that_no_seed_governs_are_named_once_with_what_to_do():
    (line,) = warnings_of("Plain", ("model", "Net"))
    assert re.search(r"sample \d of Plain differs between two reads with the same seed \(", line)
    assert "keep its generator as an attribute" in line
    (line,) = warnings_of("Denying", ("model", "Net"))
    assert line.endswith("leave out draws_randomness=False")
    assert warnings_of("Tied", ("model", "Net")) == []
    with pytest.raises(DataError, match=r"of Growing has . tokens, but had . when it was measured"):
        warnings_of("Growing", ("model", "Net"))
