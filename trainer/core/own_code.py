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
from types import ModuleType
from typing import Any, final

_IMPORT_SYSTEM = {"importlib", "_frozen_importlib", "_frozen_importlib_external"}


@final
class OwnCode(MetaPathFinder):
    """Finds modules of one folder, searched after `sys.path`.

    Attributes:
        folder: where the user's code is: the current folder when the command began.
        permitted: top-level names that a class with consent comes from.
        found: top-level names that were found in the folder; their code may import others there.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.permitted: set[str] = set()
        self.found: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a process that unpickles this find what was found here."""
        return _restored, (self.folder, self.permitted, self.found)

    def permit(self, target: str) -> None:
        """Let the module that a dotted name begins with come from the folder."""
        root = target.partition(".")[0]
        if self.folder is None:
            self.folder = Path.cwd()
        if self not in sys.meta_path:  # before the finder that it takes the place of
            sys.meta_path.insert(sys.meta_path.index(PathFinder), self)
        # A namespace package that is there, such as `hydra_plugins`, gets no part from the folder.
        if root not in sys.modules and root not in self.permitted:
            self.permitted.add(root)
            invalidate_caches()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a top-level module as if the folder stood last on `sys.path`; see the base class."""
        is_asked = fullname in self.permitted or _importer() in self.found
        if path is not None or self.folder is None or not is_asked:
            return None
        spec = PathFinder.find_spec(fullname, [*sys.path, str(self.folder)], target)
        if spec is not None and self.folder in _places(spec):
            self.found.add(fullname)
        return spec

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
        if self.folder is None or root in self.found:
            return ""
        other, own = sys.modules.get(root), PathFinder.find_spec(root, [str(self.folder)])
        if other is None or own is None or own.origin is None:
            return ""
        by = getattr(other, "__file__", None) or "Python itself"
        return f"; the name {root} is taken by {by}: rename {own.origin}"


OWN_CODE = OwnCode()
"""The user's code, for this process."""


def _restored(folder: Path | None, permitted: set[str], found: set[str]) -> OwnCode:
    OWN_CODE.folder = folder
    for name in permitted:
        OWN_CODE.permit(name)
    OWN_CODE.found |= found
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


def _importer() -> str:
    """Name the top-level module whose code imports another."""
    frame = sys._getframe(2)
    while (name := frame.f_globals.get("__name__", "").partition(".")[0]) in _IMPORT_SYSTEM:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return str(name)


def _places(spec: ModuleSpec) -> set[Path]:
    """Give the folders that a module or package lies in."""
    inner = map(Path, spec.submodule_search_locations or ())
    return {path.parent for path in ([*inner] or [Path(spec.origin or "")])}
