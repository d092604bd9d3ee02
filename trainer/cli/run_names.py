"""Find runs by what people call them. Imports neither Hydra nor torch.

A run is called by its `name`, by that of its folder, or by the folder's path below `outputs`. A
sweep is called in the same ways, by the `name` that its jobs have; a job is SWEEP/JOB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import final

from trainer.cli import remote
from trainer.cli.exit_messages import print_notes
from trainer.config.messages import MIN_SIMILARITY, clip
from trainer.core.errors import NoCheckpointError
from trainer.core.format import plural, shown_path
from trainer.core.run_folder import RunFolder, all_runs, is_sweep, is_training, runs_in


@final
class RunNames:
    """What the runs and sweeps below a folder are called."""

    def __init__(self, outputs: Path, runs: Iterable[RunFolder]) -> None:
        """Read the names of runs that were found below `outputs`."""
        # By the folder of a run or a sweep, the newest first
        self._names = dict[Path, list[str]]()
        for run in sorted(runs, key=RunFolder.by_start, reverse=True):
            folder = run.sweep or run.path
            if folder not in self._names:
                names = run.word("name"), folder.name, str(folder.relative_to(outputs))
                self._names[folder] = [*dict.fromkeys(filter(None, names))]
        self._counts = Counter(chain(*self._names.values()))

    def shortest(self, run: RunFolder) -> str:
        """Give a word that is this run's and no other's; of a job it begins with its sweep's."""
        folder = run.sweep or run.path
        for name in self._names[folder]:
            if self._counts[name] == 1:
                break
        else:
            # Its path below `outputs` is another's name.
            name = shown_path(folder)
        return name if folder == run.path else f"{name}/{run.path.name}"

    def find(self, word: str) -> list[Path]:
        """Find the folders of the runs and sweeps that a word names, the newest first."""
        word = word.rstrip("/")
        found = list[Path]()
        for folder, names in self._names.items():
            if word in names:
                found.append(folder)
        sweep, _, job = word.rpartition("/")
        if sweep and not found:
            for folder in self.find(sweep):
                if RunFolder(folder / job).is_run:
                    found.append(folder / job)
        return found

    def beginning(self, start: str, *, is_job: bool = False) -> list[str]:
        """List the words that begin so; where a job is meant, of a sweep with `/` behind it."""
        sweep, slash, _ = start.rpartition("/")
        words = list[str]()
        for folder in self.find(sweep):
            words += [f"{sweep}/{job.name}" for job in runs_in(folder)]
        for folder, names in self._names.items():
            end = "/" if is_job and is_sweep(folder) else ""
            # Paths are offered behind their first part alone.
            words += [f"{name}{end}" for name in names if slash or "/" not in name]
        return [word for word in {*words} - {start} if word.startswith(start)]

    def near(self, word: str) -> str | None:
        """Give the word that is most like one that names nothing; None where none is."""
        known = {name.lower(): name for name in self._counts}
        found = get_close_matches(word.lower(), known, n=1, cutoff=MIN_SIMILARITY)
        return known[found[0]] if found else None


def training_names(outputs: Path) -> RunNames:
    """Read what the runs that train are called; no others may be read or gone on with."""
    return RunNames(outputs, filter(is_training, all_runs(outputs)))


def called(
    key: str,
    word: str,
    outputs: Path,
    *,
    suits: Callable[[RunFolder], object] = lambda _: True,
    takes_sweep: bool = False,
) -> Path | None:
    """Give the folder of the newest run that a word names under a key; None where none does.

    Of several it is one that suits, if any does, and a line says which. Of a URL it is brought.
    """
    remote.bring(outputs, whole=False)
    names, runs = training_names(outputs), list[Path]()
    found = names.find(word)
    for folder in found:
        if takes_sweep or RunFolder(folder).is_run:
            runs.append(folder)
    if not runs and found:
        jobs = [*map(RunFolder, runs_in(found[0]))]
        what = f"a sweep of {plural(len(jobs), 'run')}"
        remedy = f"type one of them, as {key}={names.shortest(jobs[0])}"
        raise NoCheckpointError(clip(f"{key}={word}: {what}; {remedy}"))
    if not runs:
        return None
    chosen = next((each for each in runs if suits(RunFolder(each))), runs[0])
    if runs[1:]:
        what = "the newest" if chosen == runs[0] else "the newest that can be used"
        text = f"{len(runs)} runs have this name; this is {what}: {shown_path(chosen)}"
        _say_once(clip(f"{key}={word}: {text}"))
    remote.bring(chosen, whole=not takes_sweep)
    return chosen


@cache
def _say_once(line: str) -> None:
    """Print a line on stderr, once: all jobs of a sweep find the same run."""
    print_notes([line])


def unknown_run(key: str, word: str, outputs: Path) -> str:
    """Say that a word under a key is no run, and what to type instead."""
    remedy = f"; {key}=auto takes the newest run"
    if near := training_names(outputs).near(word):
        remedy = f". Did you mean {key}={near}?"
    return f"{clip(f'{key}={word}: no such run')}{remedy}"
