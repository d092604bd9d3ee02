"""Harness 2: power is lost after any operation; the disk keeps any state POSIX permits.

After each: the last checkpoint whose save returned, or the one under way, loads bit for bit; no
name of a checkpoint shows a part of one; `keep` intact ones exist; `status.json` is whole. Then
the same is asked of a protocol without one of its syncs each, which must show.

A `RecordingDisk` writes down what the program asks of its disk, by folder and file rather than by
path. From any prefix of that log, `crash` draws one of the states POSIX permits: what was synced
is there; of the bytes of a file not synced since, any prefix, torn or zero-filled; of the names in
a folder not synced since, any subset or any prefix. A rename within a folder happens whole or not.
"""

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.lib.nightly import counts
from tests.reliability.support import KEEP, assert_is, cases, intact_steps, put, replay, save, state
from trainer.checkpoint.store import CheckpointStore
from trainer.core import durable
from trainer.core.durable import FileSystem
from trainer.core.errors import NoCheckpointError
from trainer.core.run_folder import RunFolder

ROOT = 0


@dataclass(frozen=True)
class Operation:
    """One entry of the log.

    `kind` is `enter` (a name comes to a folder), `leave`, `move`, `write`, `sync`, `sync_folder`;
    `checkpoint` or `status` where the program was told that this one of step `node` is durable.
    """

    kind: str
    node: int = -1
    folder: int = -1
    name: str = ""
    target: str = ""
    data: bytes = b""
    is_folder: bool = False


@dataclass
class RecordingDisk(FileSystem):
    """Keeps a tree in memory only, and the log of what was asked."""

    root: Path
    log: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._paths = [self.root]  # by node, as it was when it was made

    def make_folder(self, path: Path) -> None:
        path.mkdir()
        self._folders[self._enter(path, is_folder=True)] = {}

    def create(self, path: Path) -> int:
        path.touch(exist_ok=False)
        return self._enter(path, is_folder=False)

    def write(self, handle: int, data: memoryview) -> int:
        self.log.append(Operation("write", handle, data=bytes(data)))
        with self._paths[handle].open("ab") as file:
            file.write(data)
        return len(data)

    def sync(self, handle: int) -> None:
        self.log.append(Operation("sync", handle))

    def close(self, handle: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        self.log.append(Operation("sync_folder", self._node(path)))

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "a rename between folders is not atomic"
        source.rename(target)
        folder = self._node(source.parent)
        node = self._folders[folder].pop(source.name)
        self._folders[folder][target.name] = node
        self.log.append(Operation("move", node, folder, source.name, target.name))

    def unlink(self, path: Path) -> None:
        path.unlink()
        self._leave(path)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()
        self._leave(path)

    def _enter(self, path: Path, *, is_folder: bool) -> int:
        node, folder = len(self._paths), self._node(path.parent)
        self._paths.append(path)
        self._folders[folder][path.name] = node
        self.log.append(Operation("enter", node, folder, path.name, is_folder=is_folder))
        return node

    def _leave(self, path: Path) -> None:
        folder = self._node(path.parent)
        node = self._folders[folder].pop(path.name)
        self.log.append(Operation("leave", node, folder, path.name))

    def _node(self, path: Path) -> int:
        node = ROOT
        for name in path.relative_to(self.root).parts:
            node = self._folders[node][name]
        return node


class _Tree:
    """The durable state, and what may or may not have reached the disk besides."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = defaultdict(dict)
        self.files: dict[int, bytes] = defaultdict(bytes)
        self.is_folder: dict[int, bool] = {ROOT: True}
        self.names_pending: dict[int, list[Operation]] = defaultdict(list)
        self.bytes_pending: dict[int, bytes] = defaultdict(bytes)

    def do(self, operation: Operation) -> None:
        if operation.kind == "enter":
            self.is_folder[operation.node] = operation.is_folder
        if operation.kind in {"enter", "leave", "move"}:
            self.names_pending[operation.folder].append(operation)
        elif operation.kind == "write":
            self.bytes_pending[operation.node] += operation.data
        elif operation.kind == "sync":
            self.files[operation.node] += self.bytes_pending.pop(operation.node, b"")
        elif operation.kind == "sync_folder":
            self.rename(operation.node, self.names_pending.pop(operation.node, []))

    def rename(self, folder: int, operations: list[Operation]) -> None:
        names = self.folders[folder]
        for operation in operations:
            if operation.kind != "enter" and names.get(operation.name) == operation.node:
                del names[operation.name]
            if operation.kind != "leave":
                names[operation.target or operation.name] = operation.node


def crash(log: list[Operation], cut: int, chance: Random, to: Path) -> None:
    """Lay out one permitted state after the first `cut` operations of a log."""
    tree = _Tree()
    for operation in log[:cut]:
        tree.do(operation)
    for folder, operations in tree.names_pending.items():
        tree.rename(folder, _some(operations, chance))
    for node, written in tree.bytes_pending.items():
        cut = chance.choice((len(written), chance.randint(0, len(written))))
        zeros = b"\0" * chance.choice((0, len(written) - cut))
        tree.files[node] += written[:cut] + zeros
    _lay_out(tree, ROOT, to)


def _some(operations: list[Operation], chance: Random) -> list[Operation]:
    if chance.random() < 0.5:
        return operations[: chance.randint(0, len(operations))]
    return [operation for operation in operations if chance.random() < 0.5]


def _lay_out(tree: _Tree, folder: int, path: Path) -> None:
    path.mkdir(exist_ok=True)
    for name, node in tree.folders[folder].items():
        if tree.is_folder[node]:
            _lay_out(tree, node, path / name)
        else:
            (path / name).write_bytes(tree.files[node])


LAST = 4
NUM_STATES = 300

Log = list[Operation]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Four saves of a run that keeps two, each with a status, as the disk saw them."""
    run = tmp_path_factory.mktemp("recorded")
    disk = RecordingDisk(run)
    with durable.use(disk):
        store = CheckpointStore(run / "checkpoints", KEEP)
        for step in range(1, LAST + 1):
            put(store, step, *state(step))
            disk.log.append(Operation("checkpoint", step))
            RunFolder(run).write_status("running", step)
            disk.log.append(Operation("status", step))
    return disk.log


def last(log: Log, cut: int, kind: str) -> int:
    """The step of the last promise of a kind, 0 if there is none."""
    steps = [op.node for op in log[:cut] if op.kind == kind]
    return steps[-1] if steps else 0


def check(run: Path, log: Log, cut: int) -> None:
    """Hold a state after power loss against what had been promised by then."""
    saved, folder = last(log, cut, "checkpoint"), run / "checkpoints"
    intact = intact_steps(folder)
    assert len(intact) >= min(KEEP, saved), f"{intact} of {saved}"
    try:
        loaded = CheckpointStore(folder, KEEP).load()
    except NoCheckpointError:
        assert saved == 0
    else:
        assert not loaded.messages
        assert loaded.step in {saved, saved + 1}
        assert_is(loaded, loaded.step)
    noted, status = last(log, cut, "status"), run / "status.json"
    if status.exists():
        assert json.loads(status.read_bytes())["step"] in {noted, noted + 1}
    else:
        assert noted == 0


def violation(log: Log, case: int, chance: Random, run: Path) -> str | None:
    """Draw a crash, and say what is wrong with the state it leaves, if anything."""
    cut = chance.randint(0, len(log))
    shutil.rmtree(run, ignore_errors=True)
    crash(log, cut, chance, run)
    try:
        check(run, log, cut)
        if case % 10 == 0:
            save(run / "checkpoints", LAST + 1)
            assert_is(CheckpointStore(run / "checkpoints").load(), LAST + 1)
    except Exception as error:
        return f"after {cut} of {len(log)} operations: {error!r}"
    return None


@counts(NUM_STATES, 4000)
def test_no_state_after_power_loss_breaks_a_promise(count, log, tmp_path):
    for case, chance in cases(count):
        found = violation(log, case, chance, tmp_path / "run")
        assert found is None, f"{found}; {replay(case)}"


MISTAKES = [
    *(("sync", "manifest.json"), ("sync", ".tmp-status"), ("sync_folder", ".tmp-step")),
    *(("sync_folder", "checkpoints"), ("sync_folder", "the root, which has no name")),
]


@pytest.mark.parametrize(("kind", "prefix"), MISTAKES)
def test_a_sync_that_is_left_out_is_noticed(kind, prefix, log, tmp_path):
    nodes = {op.node for op in log if op.kind == "enter" and op.name.startswith(prefix)} or {ROOT}
    mutated = [op for op in log if op.kind != kind or op.node not in nodes]
    assert mutated != log
    found = (violation(mutated, *case, tmp_path / "run") for case in cases(NUM_STATES))
    assert any(found), f"{NUM_STATES} states did not show it"
