"""Remove runs and sweeps, once somebody said yes: `train rm RUN [RUN ...] yes=true`.

Nothing is removed but their folders below `outputs`. A run in use, a link, and what is no run are
refused; with one of these among the words, nothing is removed at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.cli.exit_messages import print_out
from trainer.cli.run_names import RunNames
from trainer.config.messages import clip
from trainer.core import durable
from trainer.core.errors import ConfigError, NoCheckpointError, SaveError
from trainer.core.format import expanded, plural, shown_path, size
from trainer.core.run_folder import RunFolder, all_runs, hold, is_locked, is_sweep, lock_holder
from trainer.core.urls import is_url
from trainer.features.runs.state import progress_of, word_of_state

_YES = ("y", "yes")


@final
@dataclass(frozen=True)
class Removal:
    """A folder that is to be removed: of a run, or of a sweep."""

    folder: Path
    num_runs: int
    num_bytes: int
    locks: tuple[Path, ...]  # folders of runs and sweeps in it that a process may use

    def __str__(self) -> str:
        run = RunFolder(self.folder)
        what = f"{word_of_state(run)}, step {progress_of(run)}"
        if not run.is_run:
            what = f"a sweep of {plural(self.num_runs, 'run')}"
        return f"{shown_path(self.folder)}: {what}, {size(self.num_bytes)}"


def remove_runs(words: Sequence[str], settings: Mapping[str, str]) -> None:
    """Find the runs, show what goes, ask, and remove them."""
    if not words:
        raise ConfigError("train rm: needs a run: train rm RUN [RUN ...]; train ls lists them")
    if is_url(settings["outputs"]):
        fault = "nothing is removed from a store; use its own program"
        raise ConfigError(clip(f"outputs={settings['outputs']}: {fault}"))
    outputs = expanded(settings["outputs"]).absolute()
    names, faults = RunNames(outputs, all_runs(outputs)), list[str]()
    folders = dict[Path, Removal]()
    for word in words:
        try:
            folder = _folder_of(word, outputs, names)
            folders[folder] = _removal(word, folder)
        except NoCheckpointError as error:
            faults.append(str(error))
    if faults:
        raise NoCheckpointError("\n".join(faults))
    removals = list[Removal]()
    for folder, removal in folders.items():
        # What is in another of them goes with that.
        if folders.keys().isdisjoint(folder.parents):
            removals.append(removal)
            print_out(f"{removal}\n")
    num_runs = sum(each.num_runs for each in removals)
    what = f"{plural(num_runs, 'run')}, {size(sum(each.num_bytes for each in removals))}"
    if settings["yes"] != "true" and not _is_agreed(f"remove {what}? [y/N] "):
        print_out("nothing was removed\n")
        return
    for removal in removals:
        _remove(removal, outputs)
    print_out(f"removed {what}\n")


def _folder_of(word: str, outputs: Path, names: RunNames) -> Path:
    """Find the folder that a word means, a path or a name, and refuse what is not to be removed."""
    path, root = expanded(word).absolute(), os.path.realpath(outputs)
    is_there = os.path.lexists(path)
    found = [path] if is_there and _is_below(path, root) else names.find(word)
    if not found and is_there:
        raise NoCheckpointError(clip(f"{word}: not below outputs={outputs}; type outputs=DIR"))
    if not found:
        near = names.near(word)
        remedy = f". Did you mean {near}?" if near else "; train ls lists the runs"
        raise NoCheckpointError(clip(f"{word}: no such run") + remedy)
    if len(found) > 1:
        which = ", ".join(folder.name for folder in found)
        raise NoCheckpointError(f"{word}: {len(found)} runs have this name; type one of {which}")
    folder = _real(found[0])
    if folder.is_symlink() or not _is_below(folder, root):
        fault = "a link, or below one, and no link is followed; remove it by the shell's rm"
        raise NoCheckpointError(clip(f"{word}: {fault}"))
    files = [folder / name for name in (RunFolder.HYDRA, RunFolder.STATUS, RunFolder.METRICS)]
    if not is_sweep(folder) and not any(map(os.path.exists, files)):
        raise NoCheckpointError(clip(f"{word}: neither a run nor a sweep"))
    return folder


def _is_below(path: Path, root: str) -> bool:
    return root in map(str, _real(path).parents)


def _real(path: Path) -> Path:
    """Give a path without links or `..` above its last part, which may be a link."""
    return Path(os.path.normpath(f"{os.path.realpath(path.parent)}/{path.name}"))


def _removal(word: str, folder: Path) -> Removal:
    """Measure a folder, whose files may vanish meanwhile; refuse one that a process uses."""
    num_bytes, locks = 0, list[Path]()
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                num_bytes += Path(place, name).lstat().st_size
        if RunFolder.LOCK in files:
            locks.append(Path(place))
        if is_locked(Path(place)):
            fault = f"in use by {lock_holder(Path(place))}; stop it first"
            raise NoCheckpointError(clip(f"{word}: {fault}"))
    num_runs = 1 if RunFolder(folder).is_run else len([*all_runs(folder)])
    return Removal(folder, num_runs, num_bytes, tuple(locks))


def _is_agreed(question: str) -> bool:
    if not os.isatty(0) or not os.isatty(1):
        raise ConfigError("train rm: no terminal to ask on, nothing was removed; type yes=true")
    # At the end of what is typed, Ctrl-D
    with suppress(EOFError):
        return input(question).strip().lower() in _YES
    print_out("\n")
    return False


def _remove(removal: Removal, outputs: Path) -> None:
    """Remove a folder, and those above it, below `outputs`, that are empty then."""
    folder = removal.folder
    try:
        with ExitStack() as holds:
            for each in removal.locks:
                holds.enter_context(hold(each))
            durable.remove(folder)
    except OSError as error:
        raise SaveError(f"{error.filename}: could not be removed: {error.strerror}") from error
    # Of a removal that was interrupted
    for left in folder.parent.glob(f"{durable.TRASH}*"):
        durable.discard(left)
    with suppress(OSError):
        for parent in folder.parents:
            if not _is_below(parent, os.path.realpath(outputs)):
                break
            parent.rmdir()
