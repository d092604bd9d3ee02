"""Find modules of the current folder for classes that the user consented to, and for nobody else.

The folder may be a stranger's, and never stands on `sys.path`: there, whatever a library looks for
and does not find, from `hydra_plugins` to `triton`, would be taken from it. A finder of its own
gives its modules where their name was permitted, or where code of the folder imports them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, final


@final
class OwnCode(MetaPathFinder):
    """Finds modules of one folder, where no installed one has their name."""

    def __init__(self) -> None:
        # Where the user's code is: the current folder when the command began
        self.folder: Path | None = None
        # Top-level modules there that may be imported; their code may import others there
        self.names: set[str] = set()
        # Modules, of any place, that targets name
        self.targets: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a process that unpickles this find what was found here."""
        return _restored, (self.folder, self.names)

    def permit(self, target: str) -> None:
        """Let the module that a dotted name begins with come from the folder."""
        self.folder = self.folder or Path.cwd()
        self.targets.add(target.rpartition(".")[0])
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
        return (
            None if is_installed else PathFinder.find_spec(name, [str(self.folder or Path.cwd())])
        )

    def file_of(self, package: str) -> str:
        """Name the file, or folder, that a top-level module comes from; empty where there is none.

        It is not imported.
        """
        spec = self._spec(package) or PathFinder.find_spec(package)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        return next((os.path.realpath(place) for place in places if place), "")

    def digests(self) -> dict[str, str]:
        """Hash the file of every module of the user's that is imported."""
        found = {}
        for name, module in [*sys.modules.items()]:
            path = getattr(module, "__file__", None)
            if path and (name in self.targets or name.partition(".")[0] in self.names):
                with suppress(OSError):
                    found[name] = digest([Path(path)])
        return found

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


def digest(files: Iterable[Path]) -> str:
    """Hash the contents of files, in a given order."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()


def _restored(folder: Path | None, names: set[str]) -> OwnCode:
    OWN_CODE.folder = folder
    for name in names:
        OWN_CODE.permit(name)
    return OWN_CODE
