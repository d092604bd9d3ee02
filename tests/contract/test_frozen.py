"""Checkpoints hold what is trained: what is frozen is given again by the model's constructor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib.nightly import nightly
from tests.lib.run_support import curve, go, on, shell, state
from trainer.core.errors import NoCheckpointError

CODE = '''
import torch
from safetensors.torch import load_file
from torch import nn


class Adapted(nn.Module):
    """A base that is read from a file, a layer that is drawn, both frozen, and a head."""

    def __init__(self, base_file: str = "base.safetensors", teaches: bool = False) -> None:
        super().__init__()
        self.base, self.drawn = nn.Embedding(1000, 64), nn.Linear(64, 64)
        self.base.load_state_dict(load_file(base_file))
        self.requires_grad_(False)
        self.head, self.teaches = nn.Linear(64, 16), teaches

    def forward(self, input_ids):
        if self.teaches and self.training:
            self.drawn.weight.data *= 0.999
        return self.head(self.drawn(self.base(input_ids)))
'''
ADAPTED = "model._target_=adapted.Adapted scheduler=constant"


@pytest.fixture(autouse=True)
def _files(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("adapted.py").write_text(CODE)
    save_file({"weight": torch.randn(1000, 64)}, "base.safetensors")


def size(run: Path) -> int:
    return sum(path.stat().st_size for path in run.glob("checkpoints/*/*.safetensors"))


@pytest.mark.parametrize(
    "layout", ["", nightly("parallel=fsdp parallel.ranks=2")], ids=["one", "fsdp"]
)
def test_a_run_goes_on_without_its_frozen_weights_on_disk(layout):
    whole, run = go(f"{ADAPTED} {layout}"), go(f"{ADAPTED} steps=3 {layout}")
    on(run, "steps=6 parallel=auto parallel.ranks=1" if layout else "steps=6")
    assert curve(run, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-5)
    stored = {name for name in state(run) if name.startswith("model.")}
    assert stored == {"model.head.weight", "model.head.bias"}
    assert size(run.folder) < 100_000 < 1000 * 64 * 4
    assert shell(f"evaluate run={run.folder}") == 0
    assert shell(f"export run={run.folder} export.to=out") == 0
    exported = load_file("out/model.safetensors")
    assert exported["base.weight"].equal(load_file("base.safetensors")["weight"])
    assert exported["head.weight"].equal(state(run)["model.head.weight"])
    assert go(f"{ADAPTED} init={run.folder} steps=1").result["step"] == 1


def test_a_base_that_changed_or_moved_is_one_line_that_names_it_and_its_path_mends_it(capsys):
    run = go(f"{ADAPTED} steps=2")
    base = load_file("base.safetensors")
    save_file({"weight": base["weight"] + 1}, "base.safetensors")
    with pytest.raises(NoCheckpointError, match=r"frozen base\.weight not stored, and built with"):
        on(run, "steps=3")
    Path("base.safetensors").unlink()
    capsys.readouterr()
    assert shell(f"evaluate run={run.folder}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "base.safetensors" in line
    save_file(base, "moved.safetensors")
    for command in ("evaluate", "export export.to=out"):
        assert shell(f"{command} run={run.folder} model.base_file=moved.safetensors") == 0


def test_frozen_weights_that_something_else_writes_to_are_stored():
    run = go(f"{ADAPTED} model.teaches=true steps=3")
    before = state(run)["model.drawn.weight"]
    on(run, "steps=4")
    assert 0 < float((before - state(run)["model.drawn.weight"]).abs().max()) < 0.01
    assert "model.base.weight" not in state(run)
