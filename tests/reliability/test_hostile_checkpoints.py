"""A checkpoint from a stranger runs no code, and reads and writes nothing outside its folder.

Every artefact below is signed: its manifest is consistent and its digests are right, as a
stranger's would be. None may load, and the canary that each payload would plant never appears.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.reliability.support import save
from trainer.build.resume import check_position, read_allowed, read_run_state
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.state import capture, restore
from trainer.checkpoint.status import read_status
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import load_weights
from trainer.core.durable import clean, read_json, write_file
from trainer.core.errors import NoCheckpointError
from trainer.plan.order import Order
from trainer.report.metrics import evaluation_at, step_seconds_at
from trainer.report.wandb import WandbMirror

ROOT = Path(__file__).parents[2]


class Payload:
    """Plants the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "run" / "checkpoints", 1)
    return tmp_path / "run" / "checkpoints" / "step-00000001"


def sign(checkpoint: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Rewrite the manifest so that it fits the files, then change it as a stranger would."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    for name in body["files"]:
        if (checkpoint / name).is_file():
            copy = checkpoint.parent / "copy"
            size, digest = write_file(copy, [(checkpoint / name).read_bytes()])
            copy.unlink()
            body["files"][name] = {"size": size, "sha256": digest}
    if change is not None:
        change(body)
    path.write_bytes(manifests.sign(body))


def assert_refused(checkpoint: Path, canary: Path, outside: Path) -> None:
    before = sorted(outside.rglob("*"))
    for use in (
        lambda: CheckpointStore(checkpoint.parent).load(set_aside=False),
        lambda: load_weights(nn.Linear(2, 2), checkpoint),
        lambda: load_weights(nn.Linear(2, 2), checkpoint.parents[1]),
    ):
        with pytest.raises(NoCheckpointError) as refusal:
            use()
        assert "\n" not in str(refusal.value)
    assert not canary.exists()
    assert sorted(outside.rglob("*")) == before


SLOTS = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.safetensors"]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("form", ["pickle", "torch.save", "zip"])
def test_a_pickle_in_a_slot_is_never_run(
    slot: str, form: str, checkpoint: Path, canary: Path, tmp_path: Path
) -> None:
    if form == "pickle":
        (checkpoint / slot).write_bytes(pickle.dumps(Payload(canary)))
    elif form == "torch.save":
        torch.save(Payload(canary), checkpoint / slot)
    else:
        with zipfile.ZipFile(checkpoint / slot, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Payload(canary)))
    if slot != "manifest.json":
        sign(checkpoint)
    assert_refused(checkpoint, canary, tmp_path)


def test_the_canary_works(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


NAMES = [
    "../evil.safetensors",
    "../../evil.safetensors",
    "/etc/passwd",
    "a/../../evil.safetensors",
    "..",
    ".",
    "",
    ".hidden.safetensors",
    "evil\0.safetensors",
    "evil\n.safetensors",
    "%2e%2e%2fevil.safetensors",
    "e" * 300 + ".safetensors\n",
    "model.pkl",
    "model.pt",
    "..\\evil.safetensors",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_that_leaves_the_folder_is_refused(
    name: str, checkpoint: Path, canary: Path, tmp_path: Path
) -> None:
    (tmp_path / "evil.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())

    def rename(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("model.safetensors")

    (checkpoint / "model.safetensors").unlink()
    sign(checkpoint, rename)
    assert_refused(checkpoint, canary, tmp_path)


@pytest.mark.parametrize("slot", SLOTS)
def test_a_link_in_a_slot_is_refused(
    slot: str, checkpoint: Path, canary: Path, tmp_path: Path
) -> None:
    (checkpoint / slot).rename(tmp_path / slot)
    (checkpoint / slot).symlink_to(tmp_path / slot)
    assert_refused(checkpoint, canary, tmp_path)


def test_a_pipe_in_a_slot_does_not_hang(checkpoint: Path, canary: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    assert_refused(checkpoint, canary, tmp_path)


def test_a_link_instead_of_a_checkpoint_is_set_aside_and_its_target_left_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    outside = checkpoint.rename(tmp_path / "outside")
    checkpoint.symlink_to(outside)
    with pytest.raises(NoCheckpointError, match="not a folder"):
        CheckpointStore(checkpoint.parent).load()
    assert len(list(outside.iterdir())) == len(SLOTS)


def test_links_among_leftovers_are_removed_and_not_followed(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (checkpoint.parent / ".tmp-evil").symlink_to(tmp_path / "precious")
    (checkpoint.parent / ".trash-evil").mkdir()
    (checkpoint.parent / ".trash-evil" / "link").symlink_to(tmp_path / "precious")
    clean(checkpoint.parent)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == [checkpoint.name]
    assert (tmp_path / "precious" / "file").exists()


def set_size(body: dict[str, Any]) -> None:
    body["files"]["model.safetensors"]["size"] = True


def set_digest(body: dict[str, Any]) -> None:
    body["files"]["model.safetensors"]["sha256"] = None


def set_files(body: dict[str, Any]) -> None:
    body["files"] = ["model.safetensors"]


def set_step(body: dict[str, Any]) -> None:
    body["step"] = "1"


def set_meta(body: dict[str, Any]) -> None:
    body["meta"] = None


def drop_version(body: dict[str, Any]) -> None:
    del body["format_version"]


def add_field(body: dict[str, Any]) -> None:
    body["files"]["model.safetensors"]["__class__"] = "os.system"


CHANGES = [
    set_size,
    set_digest,
    set_files,
    set_step,
    set_meta,
    drop_version,
    add_field,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_signed_manifest_that_lies_is_refused(
    change: Callable[[dict[str, Any]], None], checkpoint: Path, canary: Path, tmp_path: Path
) -> None:
    sign(checkpoint, change)
    assert_refused(checkpoint, canary, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"step": ' + b"9" * 10_000 + b"}",
        b'{"sha256": NaN}',
        b"\xff\xfe",
        b"!!python/object/apply:os.mkdir [canary]",
    ],
    ids=range(10),
)
def test_a_manifest_that_is_none_is_refused(
    text: bytes, checkpoint: Path, canary: Path, tmp_path: Path
) -> None:
    (checkpoint / "manifest.json").write_bytes(text)
    assert_refused(checkpoint, canary, tmp_path)


def test_a_manifest_without_end_is_not_read(checkpoint: Path, canary: Path, tmp_path: Path) -> None:
    os.truncate(checkpoint / "manifest.json", manifests.MAX_BYTES + 1)
    assert_refused(checkpoint, canary, tmp_path)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "model.nothing"},
        {"$tensor": ["model.weight"]},
        {"$pairs": {"a": 1}},
        {"$pairs": [[["unhashable"], 1]]},
        {"$pairs": [1]},
        {"$float": "__import__('os')"},
        {"$tuple": 1},
        None,
        "text",
    ],
    ids=range(9),
)
@pytest.mark.parametrize("part", ["model", "optimizer", "rng", "extra"])
def test_a_state_tree_that_lies_is_refused(tree: object, part: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    store = CheckpointStore(tmp_path)
    tensors, meta = capture(model, optimizer, extra={})
    store.save(1, tensors, {**meta, part: tree})
    with pytest.raises(NoCheckpointError) as refusal:
        restore(store.load(), model, optimizer)
    assert "\n" not in str(refusal.value)


def point_at_step(saved: dict[str, Any]) -> None:
    saved["state"]["a.weight"]["exp_avg"] = saved["state"]["a.weight"]["step"]


def point_at_other_shape(saved: dict[str, Any]) -> None:
    saved["state"]["a.weight"]["exp_avg"] = saved["state"]["a.bias"]["exp_avg"]


def number_for_moment(saved: dict[str, Any]) -> None:
    saved["state"]["a.weight"]["exp_avg"] = 1.0


def stepped(kind: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with one layer that never had a gradient."""
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "unused": nn.Linear(2, 2)})
    optimizer = kind(model.parameters(), lr=0.1)
    model["a"](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("change", [point_at_step, point_at_other_shape, number_for_moment])
@pytest.mark.parametrize("settings", ["saved", "live"])
def test_an_optimizer_state_that_a_kernel_would_trust_is_refused(
    change: Callable[[dict[str, Any]], None], settings: Any, tmp_path: Path
) -> None:
    kind = functools.partial(torch.optim.AdamW, fused=True)
    model, optimizer = stepped(kind)
    tensors, meta = capture(model, optimizer, extra={})
    change(meta["optimizer"])
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, meta)
    fresh = kind(model.parameters(), lr=0.1)
    with pytest.raises(NoCheckpointError) as refusal:
        restore(store.load(), model, fresh, hyperparameters=settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b"\xff\xfe", b'{"warnings": ', b"null", b"9" * 5000], ids=range(5)
)
def test_side_files_of_a_stranger_are_passed_over(text: bytes, tmp_path: Path) -> None:
    for name in ("plan.json", "metrics.jsonl", "status.json"):
        (tmp_path / name).write_bytes(text + b"\n")
    with (tmp_path / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": 1, "seconds": "abc"}\n{"step": 1, "seconds": 2}\n')
        log.write(b'{"step": 1, "eval_loss": "x", "eval_accuracy": 1, "eval_seconds": 1}\n')
    assert read_json(tmp_path / "plan.json") == {}
    assert read_status(tmp_path) == {}
    assert step_seconds_at(tmp_path, 1) == 2
    assert evaluation_at(tmp_path, 1) == {"accuracy": 1}


def test_a_pipe_for_a_side_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    assert read_json(tmp_path / "plan.json") == {}


@pytest.mark.parametrize("text", ["é", "../../elsewhere", "", "a b"])
def test_a_bad_run_id_turns_the_mirror_off_with_a_warning(text: str, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "id").write_text(text, encoding="latin-1")
    told: list[str] = []
    WandbMirror("offline", tmp_path, {}, told.append).close()
    assert len(told) == 1
    assert "holds no run id" in told[0]


CUT = {"accum": {}, "state": {}, "tuning": None, "evaluation_tokens": 8}
EXTRA: dict[str, Any] = {
    "contract": {},
    "fingerprint": "f",
    "cursor": {"step": 1, "epoch": 0, "offset": 4, "samples": 4},
    "tokens": 9,
    "cut": CUT,
}


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": {**EXTRA["cursor"], "offset": 10**18}},
        {"cursor": {**EXTRA["cursor"], "step": 2}},
        {"cursor": {**EXTRA["cursor"], "epoch": 10**9}},
        {"failures": 10**18},
        {"cut": {**CUT, "evaluation_tokens": 0}},
        {"wandb": "../../elsewhere"},
        {"wandb": "a\n"},
    ],
    ids=range(7),
)
def test_a_place_that_the_steps_do_not_lead_to_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"model.a": torch.zeros(1)}, {"extra": EXTRA})
    assert read_run_state(store.load())["tokens"] == 9
    store = CheckpointStore(tmp_path / "changed")
    store.save(1, {"model.a": torch.zeros(1)}, {"extra": EXTRA | change})
    with pytest.raises(NoCheckpointError):
        read_run_state(store.load())


def test_a_place_beyond_the_epoch_and_terms_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NoCheckpointError, match=r"position 4 exceeds the epoch of 3 samples.*init="
    ):
        check_position(EXTRA, Order(3, 0, 1), tmp_path)
    check_position(EXTRA, Order(4, 0, 1), tmp_path)
    terms = {"contract": {}, "fingerprint": 3}
    (tmp_path / "allowed.json").write_text(json.dumps({"6": terms}))
    assert read_allowed(tmp_path, 5) == {}
    with pytest.raises(NoCheckpointError, match="delete it"):
        read_allowed(tmp_path, 6)


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "eval", "exec"}


def test_no_source_file_can_unpickle_or_evaluate() -> None:
    sources = sorted((ROOT / "trainer").rglob("*.py"))
    assert len(sources) > 10
    found = [f"{path.name}: {what}" for path in sources for what in dangers(path.read_text())]
    assert not found


def test_the_gate_sees_what_it_forbids() -> None:
    assert dangers("import pickle\nfrom dill import loads\ntorch.load(f)\neval('1')\n") == [
        "import pickle",
        "import dill",
        "torch.load",
        "eval",
    ]
    assert dangers("run(x, shell=True)\nmodel.eval()\n") == ["shell=True"]


def dangers(source: str) -> list[str]:
    """List what loads code from data in a source text."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names]
            modules = named if isinstance(node, ast.Import) else [node.module or ""]
            heads = [module.partition(".")[0] for module in modules]
            found += [f"import {head}" for head in heads if head in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            found += [call] if call in FORBIDDEN_CALLS else []
            arguments = {ast.unparse(keyword) for keyword in node.keywords}
            found += sorted(arguments & {"shell=True", "weights_only=False"})
    return found
