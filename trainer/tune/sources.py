"""The source behind a user's own classes: their modules, and what those call, as it is on disk."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

INSTALLED = ("site-packages", "dist-packages")
"""Folders of what changes with its version only."""

OURS = __name__.partition(".")[0]


def digest_of_sources(names: Iterable[str]) -> str:
    """Hash the files of modules and of all they lead to, but for libraries and this package.

    A module leads to those it holds, and to those that hold what it took from them.

    Args:
        names: of modules.
    """
    digest, seen, found = hashlib.blake2b(digest_size=16), set[str](), [*names]
    files: dict[str, bytes] = {}
    while found:
        name = found.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        path = _own_file(module)
        if path is not None:
            with suppress(OSError):
                files[name] = path.read_bytes()
            found += _leads_to(module)
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()


def _own_file(module: ModuleType) -> Path | None:
    """Give the file of a module that is nobody's library."""
    root, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    if file is None or root in sys.stdlib_module_names or root == OURS:
        return None
    path = Path(file)
    return None if set(INSTALLED) & set(path.parts) else path


def _leads_to(module: ModuleType) -> Iterator[str]:
    """List the modules behind what a module holds.

    Yields:
        Names.
    """
    for held in list(vars(module).values()):
        if isinstance(held, ModuleType):
            yield held.__name__
        else:
            name = getattr(held, "__module__", None)
            if isinstance(name, str):
                yield name
