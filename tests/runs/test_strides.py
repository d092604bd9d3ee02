"""A tensor of one element whose stride is not 1, as a column slice has, works everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cli_support import in_subprocess
from tests.lib.run_support import go, on, overrides, shell, state, steps
from tests.lib.run_toys import Net

pytestmark = pytest.mark.usefixtures("own_folder")

COLUMN = torch.ones(1, 2)[:, 1]


class StridedNet(Net):
    """Has a parameter, a buffer that forwards move, and a plain tensor of one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 2)[:, 1])
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(2)[::2])
        self.mean.copy_(COLUMN)
        self.last = torch.zeros(1, 2)[:, 1]

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.scale * super().forward(input_ids)
        if self.training:
            self.mean.lerp_(logits.detach().square().mean()[None], 0.1)
        return logits * self.mean


class Columns:
    """Rows of a table, of which each field is a slice of a column."""

    draws_randomness = False

    def __init__(self) -> None:
        self.table = torch.arange(80).view(40, 2) % 16
        self.lengths = [1 + index % 4 for index in range(36)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        ids = self.table[index : index + self.lengths[index], 1]
        return {"input_ids": ids, "labels": ids}


LINE = (
    "model._target_=tests.runs.test_strides.StridedNet "
    "data._target_=tests.runs.test_strides.Columns "
    "batch.global=6 accum=fixed accum.micro=3 steps=2"
)


def test_a_run_saves_it_goes_on_with_it_and_is_verified() -> None:
    assert StridedNet().mean.stride() == (2,)
    run = on(go(LINE), "steps=3")
    assert steps(run)[-1]["step"] == 3
    assert state(run)["model.mean"].shape == (1,)
    # What moves in forwards depends on the cut.
    assert shell(" ".join(overrides(f"{LINE} command=verify"))) == 9


def test_ranks_compare_and_share_it(tmp_path: Path) -> None:
    line = f"{LINE} parallel=fsdp parallel.ranks=2 wandb.mode=disabled device=cpu"
    ended = in_subprocess(line, tmp_path)
    assert ended.returncode == 0, ended.stderr
