"""Let classes that the user typed, or trusts, come from the current folder.

The folder may be a stranger's. It stands on `sys.path` only once such a class is to be found there
and nowhere else, and then behind all other folders: what is installed is never taken from it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import final

INSTALLED = {"site-packages", "dist-packages"}


@final
class OwnCode:
    """The folder where the user's code is, and the modules that their classes are of."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        # Whether it stands on `sys.path` because of a class.
        self._is_added = False
        # Modules, of any place, that targets name
        self._targets: set[str] = set()

    @property
    def folder(self) -> Path:
        """The current folder when the command began, which a run may leave."""
        return self._folder or Path.cwd()

    @folder.setter
    def folder(self, folder: Path) -> None:
        """Take another folder for the user's code; what was added to `sys.path` goes."""
        if folder == self._folder:
            return
        # In a notebook another one may have been it. An entry that Python or the user made stays.
        if self._is_added and str(self._folder) in sys.path:
            sys.path.remove(str(self._folder))
        self._folder, self._is_added = folder, False

    def permit(self, target: str) -> None:
        """Let the module that a dotted name begins with come from the folder."""
        self._folder = self.folder
        self._targets.add(target.rpartition(".")[0])
        root = target.partition(".")[0]
        file = getattr(sys.modules.get(root), "__file__", None) or ""
        if root in sys.modules and not Path(file).is_relative_to(self.folder):
            return
        # In a notebook the file may have been written since Python last listed the folder.
        invalidate_caches()
        is_taken = _origin(PathFinder.find_spec(root)) is not None
        # Behind all others: in front, a file `typing.py` of a stranger's would run in place of
        # Python's own, with the next import of it.
        if not is_taken and self._spec(root) is not None:
            sys.path.append(str(self.folder))
            self._is_added = True

    def _spec(self, name: str) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(self.folder)])

    def file_of(self, package: str) -> str:
        """Name the file, or folder, that a top-level module would come from; empty for none."""
        installed = PathFinder.find_spec(package)
        spec = installed
        # A folder of that name may lie anywhere on the path.
        if _origin(installed) is None:
            spec = self._spec(package) or installed
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        return next(map(os.path.realpath, filter(None, places)), "")

    def digests(self) -> dict[str, str]:
        """Hash the file of every module of the user's that is imported."""
        found = {}
        for name, module in [*sys.modules.items()]:
            path = Path(getattr(module, "__file__", None) or os.sep)
            is_here = path.is_relative_to(self.folder) and INSTALLED.isdisjoint(path.parts)
            if name in self._targets or (is_here and str(self.folder) in sys.path):
                with suppress(OSError):
                    found[name] = digest([path])
        return found

    def why_hidden(self, target: str) -> str:
        """Say that a module of the folder has a name that is taken; empty where it is not so."""
        root = target.partition(".")[0]
        other, own = sys.modules.get(root), _origin(self._spec(root))
        by = getattr(other, "__file__", None) or "Python itself"
        if other is None or own is None or os.path.realpath(own) == os.path.realpath(by):
            return ""
        return f"; the name {root} is taken by {by}: rename {own}"


OWN_CODE = OwnCode()  # the user's code, for this process


def _origin(spec: ModuleSpec | None) -> str | None:
    """Name the file of a module; None where there is none, or a folder without `__init__.py`."""
    return None if spec is None else spec.origin


def digest(files: Iterable[Path]) -> str:
    """Hash the contents of files, in a given order."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()
