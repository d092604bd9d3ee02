"""Weights without the rest: exports, and what a new run may start from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.reliability.support import parts_of, put
from trainer.checkpoint.state import capture
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.weights import export, open_weights
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError, SaveError


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight


def model_of(step: int) -> Tied:
    torch.manual_seed(step)
    model = Tied()
    model.norm.running_mean.normal_()
    return model


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return dict(model_of(step).state_dict())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints of different weights."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        model = model_of(step)
        put(store, step, *capture(parts_of(model, torch.optim.SGD(model.parameters()))))
    return tmp_path / "run"


def newest(run: Path) -> Loaded:
    return CheckpointStore(run / "checkpoints").load()


def assert_has(model: nn.Module, step: int) -> None:
    for name, tensor in weights_of(step).items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_an_export_holds_plain_names_and_tied_weights_under_each(run, tmp_path):
    to = export(newest(run), tmp_path / "out" / "model", {"width": 4})
    assert sorted(path.name for path in to.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((to / "config.json").read_bytes()) == {"width": 4}
    weights = load_file(to / "model.safetensors")
    assert weights.keys() == weights_of(2).keys()
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(weights[name], weights_of(2)["embed.weight"])


def test_an_export_takes_an_empty_folder_and_no_other(run, tmp_path):
    (tmp_path / "empty").mkdir()
    export(newest(run), tmp_path / "empty", {})
    with pytest.raises(ConfigError, match=r"export\.to: .*empty is not empty"):
        export(newest(run), tmp_path / "empty", {})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"export\.to"):
        export(newest(run), tmp_path / "file", {})


def test_an_export_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def refuse(disk: durable.FileSystem, handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable.FileSystem, "sync", refuse)
    with pytest.raises(SaveError, match="model: could not be written: Input/output error"):
        export(newest(run), tmp_path / "out" / "model", {})
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_are_taken_from_a_run_a_checkpoint_an_export_or_a_file(run, tmp_path):
    exported = export(newest(run), tmp_path / "exported", {})
    first = run / "checkpoints" / "step-00000001"
    tied = {name: weight for name, weight in weights_of(2).items() if name != "embed.weight"}
    save_file(tied, tmp_path / "tied.safetensors")
    files = exported / "model.safetensors", tmp_path / "tied.safetensors"
    for path in (run, first, exported, *files):
        model = Tied()
        open_weights(path).fill(model)
        assert_has(model, 1 if path == first else 2)
        assert model.head.weight is model.embed.weight


def test_weights_may_lie_in_several_files_and_lack_the_model_s_prefix_or_have_one_more(tmp_path):
    weights = weights_of(2)
    places = {n: f"model-{i % 2}.safetensors" for i, n in enumerate(weights) if n != "head.weight"}
    for file in set(places.values()):
        save_file({n: weights[n] for n in places if places[n] == file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plain, wrapped = Tied(), nn.ModuleDict({"inner": Tied()})
    open_weights(tmp_path).fill(plain)
    open_weights(tmp_path).fill(wrapped)
    assert_has(plain, 2)
    assert_has(wrapped["inner"], 2)
    save_file({f"inner.{n}": weights[n] for n in places}, tmp_path / "wrapped.safetensors")
    again = Tied()
    open_weights(tmp_path / "wrapped.safetensors").fill(again)
    assert_has(again, 2)


def test_weights_of_another_model_are_refused_with_names(run):
    text = r"different embed.weight \(float32 \[7, 4\] in the checkpoint, float32 \[7, 5\] in the"
    with pytest.raises(NoCheckpointError, match=text):
        open_weights(run).fill(Tied(width=5))


def test_a_path_without_weights_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"no tensors")
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in ("nowhere", "file", "run"):
        with pytest.raises(NoCheckpointError, match=name) as refusal:
            open_weights(tmp_path / name).fill(Tied())
        assert "\n" not in str(refusal.value)
