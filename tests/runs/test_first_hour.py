"""What a newcomer meets in the first hour: pipes, caps too small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cli_support import CHECKOUT, OWN_CLASSES, OWN_RUN
from trainer import train
from trainer.checkpoint.store import CheckpointStore
from trainer.core.errors import ConfigError, DataError
from trainer.data.text import Text


def test_a_field_that_the_first_record_lacks_is_answered_with_those_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\n{"body": "y"}\n')
    with pytest.raises(DataError, match=r"it has 'body', 'n'; type data\.field=body$"):
        Text(str(tmp_path / "a.jsonl"))


def test_readers_that_leave_and_streams_that_are_closed_disturb_nobody(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN_CLASSES)
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m trainer {OWN_RUN} <&- >&- 2>&- && exec {sys.executable} "
         "-m trainer --info searchpath"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")
    (status,) = tmp_path.glob("outputs/*/*/status.json")
    assert json.loads(status.read_text())["state"] == "completed"


class Masked(nn.Module):
    """Holds a causal mask, as many models do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(258, width)
        self.head = nn.Linear(width, 258)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def test_a_text_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {i} of a text" for i in range(40)))
    settings = ["data=text", "data.path=text.txt", "batch.global=8", "wandb.mode=disabled"]
    fixed = ["accum=fixed", "accum.micro=4", "steps=2", f"model._target_={__name__}.Masked"]
    run = train([*settings, *fixed])
    assert run.exit_code == 0
    assert CheckpointStore(run.folder / "checkpoints").load().step == 2, "with its mask of -inf"
    texts = [f"short {i}" for i in range(60)] + ["long " * 20]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    with pytest.raises(ConfigError, match="less than the longest sample, of 10"):
        train([*settings, "data.holdout=0.0", "accum=budget", "accum.max_tokens=30"])
