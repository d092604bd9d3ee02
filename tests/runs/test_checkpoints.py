"""What surrounds checkpoints in a run: the lock, status files, exports, and other runs' weights."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.checkpoint.lock import RunHeldError, hold
from trainer.checkpoint.state import capture
from trainer.checkpoint.status import Status, read_status, write_status
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.weights import export, load_weights
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError, SaveError


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints of different weights, and two unreadable ones."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        torch.manual_seed(step)
        model = Tied()
        model.norm.running_mean.normal_()
        optimizer = torch.optim.SGD(model.parameters())
        store.save(step, *capture(model, optimizer, extra={}))
    return tmp_path / "run"


def newest(run: Path) -> Loaded:
    return CheckpointStore(run / "checkpoints").load()


def weights_of(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    model = Tied()
    model.norm.running_mean.normal_()
    return dict(model.state_dict())


def assert_has(model: nn.Module, step: int) -> None:
    for name, tensor in weights_of(step).items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_an_export_holds_plain_names_and_tied_weights_under_each(run: Path, tmp_path: Path) -> None:
    to = export(newest(run), tmp_path / "out" / "model", {"width": 4})
    assert sorted(path.name for path in to.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((to / "config.json").read_bytes()) == {"width": 4}
    weights = load_file(to / "model.safetensors")
    assert weights.keys() == weights_of(2).keys()
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(weights[name], weights_of(2)["embed.weight"])


def test_an_export_takes_an_empty_folder_and_no_other(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(newest(run), tmp_path / "empty", {})
    with pytest.raises(ConfigError, match=r"export\.to: .*empty is not empty"):
        export(newest(run), tmp_path / "empty", {})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"export\.to"):
        export(newest(run), tmp_path / "file", {})


def test_an_export_that_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(disk: durable.Posix, handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable.Posix, "sync", refuse)
    with pytest.raises(SaveError, match="model: could not be written: Input/output error"):
        export(newest(run), tmp_path / "out" / "model", {})
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("form", ["run", "checkpoint", "export", "file"])
def test_weights_are_taken_from_a_run_a_checkpoint_an_export_or_a_file(
    form: str, run: Path, tmp_path: Path
) -> None:
    exported = export(newest(run), tmp_path / "exported", {})
    path = {
        "run": run,
        "checkpoint": run / "checkpoints" / "step-00000001",
        "export": exported,
        "file": exported / "model.safetensors",
    }[form]
    model = Tied()
    load_weights(model, path)
    assert_has(model, 1 if form == "checkpoint" else 2)
    assert model.head.weight is model.embed.weight


def test_a_tied_weight_is_found_under_either_name(tmp_path: Path) -> None:
    weights = weights_of(2)
    del weights["embed.weight"]
    save_file(weights, tmp_path / "w.safetensors")
    model = Tied()
    load_weights(model, tmp_path / "w.safetensors")
    assert_has(model, 2)


def test_a_damaged_newest_checkpoint_gives_way_and_is_left_in_place(run: Path) -> None:
    os.truncate(run / "checkpoints" / "step-00000002" / "model.safetensors", 10)
    model = Tied()
    assert load_weights(model, run).name == "step-00000001"
    assert_has(model, 1)
    assert (run / "checkpoints" / "step-00000002").is_dir()


def test_weights_of_another_model_are_refused_with_names(run: Path) -> None:
    text = r"different embed.weight \(float32 \[7, 4\] in the checkpoint, float32 \[7, 5\] in the"
    with pytest.raises(NoCheckpointError, match=text):
        load_weights(Tied(width=5), run)
    with pytest.raises(NoCheckpointError, match=r"missing bias, weight; unexpected embed\.weight"):
        load_weights(nn.Linear(2, 2), run)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b"no tensors"),
        lambda path: (path / "checkpoints").mkdir(parents=True),
        lambda path: (path / "checkpoints" / "step-00000001").mkdir(parents=True),
    ],
    ids=["nothing", "empty folder", "other file", "no checkpoint", "empty checkpoint"],
)
def test_a_path_without_weights_is_one_line(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "it")
    with pytest.raises(NoCheckpointError, match="it") as refusal:
        load_weights(Tied(), tmp_path / "it")
    assert "\n" not in str(refusal.value)


def test_the_status_is_json_for_scripts(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="running"))
    write_status(tmp_path, Status(state="failed", exit_code=6, step=9, reason="not finite"))
    assert json.loads((tmp_path / "status.json").read_bytes()) == {
        "state": "failed",
        "exit_code": 6,
        "step": 9,
        "reason": "not finite",
    }
    with pytest.raises(SaveError, match=r"status\.json"):
        write_status(tmp_path / "nowhere", Status(state="running"))


def test_a_run_that_nobody_holds_is_not_read_as_running(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {}
    with hold(tmp_path):
        write_status(tmp_path, Status(state="running", step=4))
        assert read_status(tmp_path)["state"] == "running"
        with pytest.raises(RunHeldError):
            hold(tmp_path).__enter__()
    found = read_status(tmp_path)
    assert (found["state"], found["step"], found["reason"]) == (
        "failed",
        4,
        "its process was killed",
    )
    write_status(tmp_path, Status(state="completed", exit_code=0, step=9))
    assert read_status(tmp_path)["state"] == "completed"
    (tmp_path / "status.json").write_text("[")
    assert read_status(tmp_path) == {}


def test_json_holds_null_for_what_is_not_finite(tmp_path: Path) -> None:
    content = {"loss": float("nan"), "more": [float("inf"), (1.5, "text")], "deep": {"x": -1e400}}
    durable.write_json(tmp_path / "result.json", content)
    assert json.loads((tmp_path / "result.json").read_bytes()) == {
        "loss": None,
        "more": [None, [1.5, "text"]],
        "deep": {"x": None},
    }


def test_a_log_grows_by_whole_lines(tmp_path: Path) -> None:
    for line in (b"1\n", b"2\n"):
        durable.append(tmp_path / "log", line, durable=line == b"2\n")
    assert (tmp_path / "log").read_bytes() == b"1\n2\n"


def hold_and_wait(run: Path, pipe: Connection) -> None:
    with hold(run):
        pipe.send("held")
        pipe.recv()


def test_a_run_is_held_by_one_process_and_free_when_that_dies(tmp_path: Path) -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    holder = multiprocessing.get_context("spawn").Process(
        target=hold_and_wait, args=(tmp_path, there)
    )
    holder.start()
    assert here.recv() == "held"
    with pytest.raises(RunHeldError, match=f"in use by process {holder.pid} on") as refusal:
        hold(tmp_path).__enter__()
    assert refusal.value.exit_code == 4
    assert "\n" not in str(refusal.value)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    here.close()
    there.close()
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()


def test_one_process_cannot_hold_a_run_twice_but_again(tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(RunHeldError, match=str(os.getpid())):
        hold(tmp_path).__enter__()
    with hold(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_that_outlives_its_parent_does_not_hold_the_run(tmp_path: Path) -> None:
    with hold(tmp_path):
        lock = (tmp_path / ".lock").stat().st_ino
        worker = os.fork()
        if worker == 0:
            os._exit(lock in open_files())
        assert lock in open_files()
        assert os.waitpid(worker, 0)[1] == 0


def open_files() -> list[int]:
    """List the inodes this process has open."""
    found = []
    for handle in range(256):
        with contextlib.suppress(OSError):
            found.append(os.fstat(handle).st_ino)
    return found


@pytest.mark.parametrize("text", [b"", b"nonsense", b"[]", b'{"pid": "x"}', b"\xff"])
def test_a_lock_file_that_lies_around_means_nothing(text: bytes, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(text)
    with hold(tmp_path):
        (tmp_path / ".lock").write_bytes(text)
        with pytest.raises(RunHeldError, match="in use by another process"):
            hold(tmp_path).__enter__()


def test_a_run_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="No such file or directory"):
        hold(tmp_path / "nowhere").__enter__()
    (tmp_path / "target").touch()
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(SaveError, match=r"\.lock: could not be written"):
        hold(tmp_path).__enter__()
    assert (tmp_path / "target").read_bytes() == b""


def test_holding_a_run_clears_what_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / ".tmp-status.json-1").write_bytes(b"{")
    (tmp_path / "metrics.jsonl").touch()
    with hold(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "metrics.jsonl"]


def test_a_run_on_a_full_disk_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        holding = contextlib.ExitStack()
        holding.enter_context(hold(tmp_path))
    with holding, pytest.raises(RunHeldError, match="in use by another process"):
        holding.enter_context(hold(tmp_path))


def test_a_file_system_without_locks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SaveError, match="cannot be locked on this file system"):
        contextlib.ExitStack().enter_context(hold(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
    write_status(tmp_path, Status(state="running"))
    assert read_status(tmp_path)["state"] == "failed"
