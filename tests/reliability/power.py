"""Power loss, simulated: which trees of files may a disk hold after the plug was pulled?

A `RecordingDisk` writes down what the program asks of its disk, by folder and file rather than by
path. From any prefix of that log, `crash` draws one of the states POSIX permits: what was synced
is there; of the bytes of a file not synced since, any prefix, torn or zero-filled; of the names in
a folder not synced since, any subset or any prefix. A rename within a folder happens whole or not.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.core.durable import FileSystem

ROOT = 0


@dataclass(frozen=True)
class Operation:
    """One entry of the log.

    `kind` is `enter` (a name comes to a folder), `leave`, `move`, `write`, `truncate`, `sync`,
    `sync_folder`, or `done` (not of the disk: the program was told that its wish is durable).
    """

    kind: str
    node: int = -1
    folder: int = -1
    name: str = ""
    target: str = ""
    data: bytes = b""
    is_folder: bool = False
    promise: Any = None


@dataclass
class RecordingDisk(FileSystem):
    """Keeps a tree in memory only, and the log of what was asked."""

    root: Path
    log: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._next_node = 1

    def promise(self, promise: Any) -> None:
        self.log.append(Operation("done", promise=promise))

    def make_folder(self, path: Path) -> None:
        path.mkdir()
        self._folders[self._enter(path, is_folder=True)] = {}

    def create(self, path: Path) -> int:
        path.touch(exist_ok=False)
        return self._enter(path, is_folder=False)

    def open_append(self, path: Path) -> int:
        raise NotImplementedError(f"{path}: no harness appends")

    def write(self, handle: int, data: memoryview) -> int:
        self.log.append(Operation("write", handle, data=bytes(data)))
        with self._path(handle).open("ab") as file:
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
        node, self._next_node = self._next_node, self._next_node + 1
        folder = self._node(path.parent)
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

    def _path(self, node: int) -> Path:
        for folder, names in self._folders.items():
            for name, inner in names.items():
                if inner == node:
                    return (self.root if folder == ROOT else self._path(folder)) / name
        raise AssertionError(f"no name leads to {node}")


class _Tree:
    """The durable state, and what may or may not have reached the disk besides."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = defaultdict(dict)
        self.files: dict[int, bytes] = defaultdict(bytes)
        self.is_folder: dict[int, bool] = {ROOT: True}
        self.names_pending: dict[int, list[Operation]] = defaultdict(list)
        self.bytes_pending: dict[int, list[Operation]] = defaultdict(list)

    def do(self, operation: Operation) -> None:
        if operation.kind == "enter":
            self.is_folder[operation.node] = operation.is_folder
        if operation.kind in {"enter", "leave", "move"}:
            self.names_pending[operation.folder].append(operation)
        elif operation.kind in {"write", "truncate"}:
            self.bytes_pending[operation.node].append(operation)
        elif operation.kind == "sync":
            self.write(operation.node, self.bytes_pending.pop(operation.node, []))
        elif operation.kind == "sync_folder":
            self.rename(operation.node, self.names_pending.pop(operation.node, []))

    def rename(self, folder: int, operations: list[Operation]) -> None:
        names = self.folders[folder]
        for operation in operations:
            if operation.kind != "enter" and names.get(operation.name) == operation.node:
                del names[operation.name]
            if operation.kind != "leave":
                names[operation.target or operation.name] = operation.node

    def write(self, node: int, operations: list[Operation]) -> None:
        for operation in operations:
            stored = b"" if operation.kind == "truncate" else self.files[node]
            self.files[node] = stored + operation.data


def crash(log: list[Operation], cut: int, chance: random.Random, to: Path) -> None:
    """Lay out one permitted state after the first `cut` operations of a log."""
    tree = _Tree()
    for operation in log[:cut]:
        tree.do(operation)
    for folder, operations in tree.names_pending.items():
        tree.rename(folder, _some(operations, chance))
    for node, operations in tree.bytes_pending.items():
        synced = tree.files[node]
        tree.write(node, operations[: chance.randint(0, len(operations))])
        tree.files[node] = _tear(synced, tree.files[node], chance)
    _lay_out(tree, ROOT, to)


def _some(operations: list[Operation], chance: random.Random) -> list[Operation]:
    if chance.random() < 0.5:
        return operations[: chance.randint(0, len(operations))]
    return [operation for operation in operations if chance.random() < 0.5]


def _tear(synced: bytes, written: bytes, chance: random.Random) -> bytes:
    """Of bytes written but not synced: all, a prefix, or zeros where they should be."""
    start = len(synced) if written.startswith(synced) else 0
    tail = written[start:]
    cut = chance.randint(0, len(tail))
    how = chance.randrange(3)
    torn = (tail, tail[:cut], tail[:cut] + b"\0" * (len(tail) - cut))[how]
    return written[:start] + torn


def _lay_out(tree: _Tree, folder: int, path: Path) -> None:
    path.mkdir(exist_ok=True)
    for name, node in tree.folders[folder].items():
        if tree.is_folder[node]:
            _lay_out(tree, node, path / name)
        else:
            (path / name).write_bytes(tree.files[node])
