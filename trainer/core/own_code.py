"""Find modules of the current folder for classes that the user consented to, and for nobody else.

The folder may be a stranger's, and never stands on `sys.path`: there, whatever a library looks for
and does not find, from `hydra_plugins` to `triton`, would be taken from it. A finder of its own
gives its modules where their name was permitted, or where code of the folder imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
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
        from modulefinder import ModuleFinder  # noqa: PLC0415 - for runs with own classes alone

        finder = ModuleFinder(path=[str(self.folder or Path.cwd())], excludes=["trainer"])
        for target in targets:
            names = target.split(".")[:-1]
            for end in range(1, len(names) + 1):  # its last names may be classes
                with suppress(ImportError, SyntaxError, ValueError, OSError, RecursionError):
                    finder.import_hook(".".join(names[:end]))
        found = (getattr(module, "__file__", None) for module in finder.modules.values())
        return sorted({Path(file) for file in found if file})

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
