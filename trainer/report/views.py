"""Show runs by the files in their folders, as features do that `conf/views.yaml` names.

Each writes one file: when a run has ended or was evaluated, and by a command, `train NAME`, which
may also print a text.
Imports no torch.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import final

from trainer.config.option_files import data_dir, load_yaml
from trainer.core.run_folder import RunFolder, runs_in

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class View:
    """Shows one run, or several side by side."""

    target: str  # a function of run folders and a file, by its path
    file: str  # its name in the folder of a run or a sweep
    help: str  # what its command does
    about: str  # what a person finds in the file
    # Functions of run folders whose text the command prints, by what is typed: `to=NAME`
    printed: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str, runs: Sequence[Path]) -> str:
        """Give what is printed in place of a file."""
        printed: str = pkgutil.resolve_name(self.printed[name])(runs)
        return printed

    def write(self, runs: Sequence[Path], file: Path) -> None:
        """Write the file; `runs` are their folders, and may lack anything."""
        pkgutil.resolve_name(self.target)(runs, file)


@cache
def views() -> dict[str, View]:
    """Read which there are, by the names of their commands."""
    found = load_yaml(data_dir("conf") / "views.yaml")
    return {name: View(target=each.pop("_target_"), **each) for name, each in found.items()}


def write_views(folder: Path) -> None:
    """Show a run, or a sweep, that ended; what goes wrong is one warning."""
    if (folder / RunFolder.CONFIG).is_file() and not (folder / RunFolder.METRICS).is_file():
        return  # a run without a step
    runs = runs_in(folder)
    if not runs:
        return
    for view in views().values():
        try:
            view.write(runs, folder / view.file)
        except Exception as error:  # a picture of a run never makes it fail
            why = f"{type(error).__name__}: {error}"
            _log.warning("%s could not be written: %s", view.file, why)
