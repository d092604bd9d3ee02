"""A checkpoint from a stranger runs no code, and reads and writes nothing outside its folder."""

import copy
import functools
import hashlib
import itertools
import json
import operator
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lib.tracked import mirror_of
from tests.reliability.support import parts_of, put, save
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.state import capture, restore
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import open_weights
from trainer.core.durable import clean, read_json
from trainer.core.errors import NoCheckpointError
from trainer.core.run_folder import RunFolder
from trainer.features.trackers.wandb import WandbTracker
from trainer.report.metrics import evaluation_at
from trainer.report.mirror import close_all

SLOTS = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.safetensors"]


class Payload:
    """Plants the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "run" / "checkpoints", 1)
    return tmp_path / "run" / "checkpoints" / "step-00000001"


def sign(checkpoint: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Rewrite the manifest so that it fits the files, then change it as a stranger would."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    for name in body["files"]:
        if (checkpoint / name).is_file():
            data = (checkpoint / name).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            body["files"][name] = {"size": len(data), "sha256": digest}
    if change is not None:
        change(body)
    path.write_bytes(manifests.sign(body))


def set_at(*place: Any) -> Callable[[dict[str, Any]], None]:
    """Put a value into a tree, the last of `place`, under the keys before it."""

    def change(body: dict[str, Any]) -> None:
        *keys, last, value = place
        functools.reduce(operator.getitem, keys, body)[last] = value

    return change


def plant(checkpoint: Path, slot: str) -> None:
    payload = Payload(checkpoint.parents[2] / "canary")
    (checkpoint / slot).write_bytes(pickle.dumps(payload))
    if slot != "manifest.json":
        sign(checkpoint)


def rename(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint.parents[2] / "evil.safetensors")
    sign(checkpoint, lambda body: body["files"].update({name: body["files"].pop(SLOTS[1])}))


def link(checkpoint: Path, slot: str) -> None:
    outside = checkpoint.parents[2] / slot
    (checkpoint / slot).rename(outside)
    (checkpoint / slot).symlink_to(outside)


def pipe(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")


def overwrite(checkpoint: Path, text: bytes, size: int | None = None) -> None:
    (checkpoint / "manifest.json").write_bytes(text)
    os.truncate(checkpoint / "manifest.json", size or len(text))


NAMES = ["../evil.safetensors", "..", "", ".hidden.safetensors", "evil\n.safetensors", "model.pkl"]
LIES = [
    set_at("files", "model.safetensors", "size", True),
    set_at("files", "model.safetensors", "sha256", None),
    set_at("files", "model.safetensors", "__class__", "os.system"),
    set_at("files", ["model.safetensors"]),
    *(set_at("step", "1"), set_at("parts", None), lambda body: body.pop("format_version")),
]
NO_MANIFESTS = [
    *(b"", b"[]", b"[" * 100_000, b'{"sha256": NaN}', b'{"step": ' + b"9" * 10_000 + b"}"),
    *(b"\xff\xfe", b"!!python/object/apply:os.mkdir [canary]"),
]
ATTACKS = {
    "payload": [partial(plant, slot=slot) for slot in SLOTS],
    "name": [partial(rename, name=name) for name in NAMES],
    "no plain file": [*(partial(link, slot=slot) for slot in SLOTS), pipe],
    "lie": [partial(sign, change=lie) for lie in LIES],
    "no manifest": [
        *(partial(overwrite, text=text) for text in NO_MANIFESTS),
        partial(overwrite, text=b"{}", size=manifests.MAX_BYTES + 1),
    ],
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_stranger_s_checkpoint_is_refused_and_leads_nowhere(kind, checkpoint, tmp_path):
    for number, attack in enumerate(ATTACKS[kind]):
        place = tmp_path / str(number)
        run = shutil.copytree(checkpoint.parents[1], place / "run")
        attacked = run / "checkpoints" / checkpoint.name
        attack(attacked)
        before = sorted(place.rglob("*"))
        for use in (
            partial(CheckpointStore(attacked.parent).load, set_aside=False),
            lambda: open_weights(attacked).fill(nn.Linear(2, 2)),  # noqa: B023
            lambda: open_weights(run).fill(nn.Linear(2, 2)),  # noqa: B023
        ):
            with pytest.raises(NoCheckpointError) as refusal:
                use()
            assert "\n" not in str(refusal.value)
        assert sorted(place.rglob("*")) == before, f"{attack}: the canary, or what was read"


def test_the_canary_works(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def test_links_are_set_aside_or_removed_and_not_followed(checkpoint, tmp_path):
    outside = checkpoint.rename(tmp_path / "outside")
    checkpoint.symlink_to(outside)
    with pytest.raises(NoCheckpointError, match="not a folder"):
        CheckpointStore(checkpoint.parent).load()
    for name in (".tmp-evil", ".trash-evil"):
        (checkpoint.parent / name).symlink_to(outside)
    clean(checkpoint.parent)
    assert [path.name for path in checkpoint.parent.iterdir()] == [f"damaged-{checkpoint.name}"]
    assert len(list(outside.iterdir())) == len(SLOTS)


TREES = [
    *({"$tensor": "model.nothing"}, {"$tensor": ["model.weight"]}, {"$pairs": {"a": 1}}),
    *({"$pairs": [[["unhashable"], 1]]}, {"$pairs": [1]}, {"$float": "__import__('os')"}),
    *({"$tuple": 1}, None, "text"),
]


def test_a_state_tree_that_lies_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    live = parts_of(model, torch.optim.AdamW(model.parameters()))
    tensors, parts = capture(live)
    store = CheckpointStore(tmp_path)
    put(store, 1, tensors, parts)
    loaded = store.load()
    for part, tree in itertools.product(live, TREES):
        for lie in (tree, {"version": 1, "state": tree}):
            with pytest.raises(NoCheckpointError, match=part) as refusal:
                restore(replace(loaded, parts={**parts, part: lie}), live)
            assert "\n" not in str(refusal.value)


def test_an_optimizer_state_that_a_fused_kernel_would_read_beyond_is_refused(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model["a"](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    tensors, parts = capture(parts_of(model, optimizer))
    put(CheckpointStore(tmp_path), 1, tensors, parts)
    loaded, moments = CheckpointStore(tmp_path).load(), parts["optimizer"]["state"]["state"]
    for lie in (moments["a.weight"]["step"], moments["a.bias"]["exp_avg"], 1.0):
        changed = copy.deepcopy(parts)
        changed["optimizer"]["state"]["state"]["a.weight"]["exp_avg"] = lie
        fresh = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with pytest.raises(NoCheckpointError, match=r"a\.weight\.exp_avg does not fit"):
            restore(replace(loaded, parts=changed), parts_of(model, fresh))


def test_side_files_of_a_stranger_are_passed_over(tmp_path):
    for text in (b"[" * 200_000, b"\xff\xfe", b"null", b"9" * 5000):
        for name in ("plan.json", "metrics.jsonl", "status.json"):
            (tmp_path / name).write_bytes(text + b"\n")
        with (tmp_path / "metrics.jsonl").open("ab") as log:
            log.write(b'{"step": 1, "seconds": 2}\n')
            log.write(b'{"step": 1, "eval_loss": "x", "eval_accuracy": 1, "eval_seconds": 1}\n')
        assert read_json(tmp_path / "plan.json") == {}
        assert RunFolder(tmp_path).status() == {}
        assert evaluation_at(tmp_path, 1) == {"accuracy": 1}
    (tmp_path / "plan.json").unlink()
    os.mkfifo(tmp_path / "plan.json")
    assert read_json(tmp_path / "plan.json") == {}


def test_a_bad_run_id_or_another_server_turns_the_mirror_off_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for file, text, why in (
        ("run/wandb/id", "../../elsewhere", "holds no run id"),
        ("run/wandb/settings", "", "are not taken from a run"),
        ("wandb/settings", "", "wandb/settings: settings of W&B are not taken from"),
        (".wandb/settings", "", "~/.config/wandb/settings; delete it"),
    ):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        warnings: list[str] = []
        mirror = mirror_of("wandb", WandbTracker(mode="online"), tmp_path / "run", warnings.append)
        mirror.start()
        close_all([mirror], None)
        (warning,) = warnings
        assert why in warning
        path.unlink()
