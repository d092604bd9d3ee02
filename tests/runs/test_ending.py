"""A sample that cannot be written ends no run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.commands.train import sample_text
from trainer.data.view import DataView


class Decoding:
    """Data that turn tokens into text."""

    start_id = 0

    def __init__(self, decode):
        self.decode = decode

    def __len__(self):
        return 0

    def __getitem__(self, i):
        raise IndexError(i)


def parts_of(logit: float, decode):
    """Give what a sample is made of: a model that gives the same logit for everything."""
    module = nn.Linear(1, 1)
    return SimpleNamespace(
        module=module,
        call=lambda fields: torch.full((1, fields["input_ids"].shape[1], 4), logit),
        source=SimpleNamespace(lengths=torch.tensor([8])),
        config=SimpleNamespace(seed=0),
        world=SimpleNamespace(device=torch.device("cpu")),
        train_set=DataView(Decoding(decode)),
    )


def test_a_sample_is_the_text_of_what_is_drawn():
    assert sample_text(parts_of(0.0, lambda ids: f"{len(ids)} tokens")) == "160 tokens"


@pytest.mark.parametrize(
    ("logit", "decode", "why"), [(float("nan"), str, "RuntimeError"), (0.0, {}.pop, "KeyError")]
)
def test_a_sample_that_fails_is_left_out_with_a_warning(logit, decode, why, caplog):
    parts = parts_of(logit, decode)
    assert sample_text(parts) is None
    assert parts.module.training
    (record,) = caplog.records
    assert record.getMessage().startswith(f"no text sample generated: {why}")
    assert "\n" not in record.getMessage()
