"""What a config names that has to be there: files, and classes of the user's own.

Looked up before torch is imported, which a class's module would do. What is found here to be
missing is missing; what is not found out here shows when it is used.
"""

from __future__ import annotations

import ast
import os
import stat
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from trainer.config.messages import clip, did_you_mean
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError, NoCheckpointError

BUILT_IN = "trainer"

WANDB_LINK = "debug-core.log"
"""W&B leaves a link of this name to its own log, outside; nothing is ever written through it."""


def refuse_missing(config: RunConfig) -> None:
    """Refuse a run whose classes, data or weights are not there.

    Raises:
        ConfigError: one line per class.
        DataError: there is nothing at `data.path`.
        NoCheckpointError: there is nothing at `init`.
    """
    faults = [
        clip(f"{path}._target_={target}: {fault}")
        for path, target in config.targets
        for fault in _class_faults(target)
    ]
    if faults:
        raise ConfigError(*faults)
    path = config.data.params.get("path")
    is_ours = config.data.target.startswith(f"{BUILT_IN}.")
    if is_ours and path == "":
        raise DataError("data.path=: names nothing; type a file or a folder, . for this one")
    if is_ours and isinstance(path, str) and not _exists(path):
        raise DataError(clip(f"data.path={path}: no such file or folder"))
    if config.init is not None:
        if not _exists(config.init):
            raise NoCheckpointError(clip(f"init={config.init}: no such file or folder"))
        source = Path(config.init).expanduser()
        refuse_odd_files(source, links=(source / "config.yaml").exists())


def refuse_odd_files(folder: Path, *, links: bool = True) -> None:
    """Refuse a folder, perhaps a stranger's, that leads elsewhere, or that reading waits for.

    Args:
        folder: a run, or any other files.
        links: whether to refuse links that lead out of it, as caches of downloads hold them.

    Raises:
        NoCheckpointError: a link in it leads out of it, or a file is a pipe or a device.
    """
    home = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink():
                is_foreign = not path.resolve().is_relative_to(home)
                if links and is_foreign and path.name != WANDB_LINK:
                    text = f"{path}: a link that leads out of the run's folder"
                    raise NoCheckpointError(clip(text))
            elif stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise NoCheckpointError(clip(f"{path}: neither a file nor a folder"))


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long, a home that nobody has
        return False


def _class_faults(target: str) -> Iterator[str]:
    """Say what is missing on the way to a class, without importing anything.

    Yields:
        One line at most.
    """
    root, *parts = target.split(".")
    if not root.isidentifier() or not parts:
        yield "must be the import path of a class: package.Class"
        return
    if root == BUILT_IN or root in sys.modules:
        return
    spec = find_spec(root)
    if spec is None:
        yield f"there is no module named {root} here, nor is one installed"
        return
    file = _source(spec, parts[:-1])
    names = None if file is None else _names(file)
    if names is not None and parts[-1] not in names:
        yield f"{file} has no {parts[-1]}.{did_you_mean(parts[-1], names)}"


def _source(spec: ModuleSpec, parts: list[str]) -> Path | None:
    """Find the file of a module, where it is one of Python."""
    file = None if spec.origin is None else Path(spec.origin)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in parts:
        tried = [f / name for f in folders for name in (f"{part}.py", f"{part}/__init__.py")]
        file = next((path for path in tried if path.is_file()), None)
        folders = [folder / part for folder in folders]
    return file if file is not None and file.suffix == ".py" else None


def _names(file: Path) -> set[str] | None:
    """List every name that occurs in a module; None where it can make others when it runs."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return None if names & {"*", "__getattr__", "globals", "exec", "setattr"} else names
