"""Find modules of the current folder for classes that the user consented to, and for nobody else.

The folder may be a stranger's, and never stands on `sys.path`: there, whatever a library looks for
and does not find, from `hydra_plugins` to `triton`, would be taken from it. A finder of its own
gives its modules where their name was permitted, or where code of the folder imports them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from itertools import takewhile
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, final


@final
class OwnCode(MetaPathFinder):
    """Finds modules of one folder, where no installed one has their name.

    Attributes:
        folder: where the user's code is: the current folder when the command began.
        names: top-level modules there that may be imported; their code may import others there.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.names: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a process that unpickles this find what was found here."""
        return _restored, (self.folder, self.names)

    def permit(self, target: str) -> None:
        """Let the module that a dotted name begins with come from the folder."""
        self.folder = self.folder or Path.cwd()
        if self not in sys.meta_path:
            sys.meta_path.insert(sys.meta_path.index(PathFinder), self)
        invalidate_caches()
        root = target.partition(".")[0]
        if root not in sys.modules and self._spec(root) is not None:
            self.names.add(root)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a top-level module that is permitted, or that code of the folder imports."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = "" if frame is None else str(frame.f_globals.get("__name__"))
        if path is not None or self.names.isdisjoint((fullname, importer.partition(".")[0])):
            return None
        if (spec := self._spec(fullname)) is not None:
            self.names.add(fullname)
        return spec

    def _spec(self, name: str) -> ModuleSpec | None:
        """Find a module in the folder; None where one of its name is installed."""
        other = PathFinder.find_spec(name)
        is_installed = other is not None and other.origin is not None
        return None if is_installed else PathFinder.find_spec(name, [str(self.folder)])

    def files(self, targets: Sequence[str]) -> list[Path]:
        """List the files of the folder that importing some classes would run; runs none of them.

        Imports that a file makes by name, and no statement, are not seen.
        """
        folder, found, waiting = self.folder or Path.cwd(), set[Path](), [*targets]
        while waiting:
            parts = [*takewhile(str.isidentifier, waiting.pop().split("."))]
            for end in range(1, len(parts) + 1):  # the last ones may be classes
                place = folder.joinpath(*parts[:end])
                files = [place.with_name(f"{place.name}{suffix}") for suffix in all_suffixes()]
                for path in (*files, place / "__init__.py"):
                    if parts[0] != "trainer" and path not in found and path.is_file():
                        found.add(path)
                        waiting += _imports(path, parts[: end - (path in files)])
        return sorted(found)

    def why_hidden(self, target: str) -> str:
        """Say that a module of the folder has a name that is taken; empty where it is not so."""
        root = target.partition(".")[0]
        other, own = sys.modules.get(root), PathFinder.find_spec(root, [str(self.folder)])
        if root in self.names or other is None or own is None or own.origin is None:
            return ""
        by = getattr(other, "__file__", None) or "Python itself"
        return f"; the name {root} is taken by {by}: rename {own.origin}"


OWN_CODE = OwnCode()
"""The user's code, for this process."""


def _restored(folder: Path | None, names: set[str]) -> OwnCode:
    OWN_CODE.folder = folder
    for name in names:
        OWN_CODE.permit(name)
    return OWN_CODE


def _imports(path: Path, package: Sequence[str]) -> list[str]:
    """List the dotted names that a module imports by statements; none where it is not Python.

    `package` is what relative ones are relative to.
    """
    found: list[str] = []
    tree: ast.AST = ast.Module([], [])
    with suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            names = [*base, *([node.module] if node.module else [])]
            found += [".".join([*names, alias.name]) for alias in node.names]
    return found
