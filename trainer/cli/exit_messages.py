"""Print how a command ended: on stderr, one line per fault; a crash in full in the run folder."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.config.secrets import without_secrets
from trainer.core.errors import GO_ON, Preempted, TrainError
from trainer.core.format import at_words, printable_lines, shown_path
from trainer.core.run_folder import RunFolder
from trainer.core.user_code import excerpt
from trainer.launch.membership import global_rank

_SHOWN_FRAMES = 3


def print_error(error: TrainError) -> int:
    """Print what is wrong, on the first rank or the one that asks to, and give the exit code."""
    # Hydra's own programs print the traceback then.
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        _print("".join(traceback.format_exception(error)))
    start = "train: error"
    # A run that was saved in time and can go on has not failed.
    if isinstance(error, Preempted):
        start = "train"
    if global_rank() == 0 or error.is_own:
        notes = [*getattr(error, "__notes__", ())]
        for line in str(error).splitlines() or [type(error).__name__]:
            # A command has a line of its own, to be copied.
            text, go_on, command = line.partition(f": {GO_ON}")
            _print(f"{start}: {text}\n")
            if go_on:
                notes.append(f"{GO_ON}{command}")
        print_notes(notes)
    return error.exit_code


def print_notes(notes: Iterable[str]) -> None:
    """Print lines beside an error, or on what was typed, once for all ranks."""
    if global_rank() == 0:
        _print("".join(f"train: {note}\n" for note in notes))


def print_crash(error: Exception, folder: Path | None = None) -> int:
    """Print a traceback, or of one that is kept, or of the user's code, the end; give exit code."""
    path = folder and RunFolder(folder).traceback(global_rank())
    is_in_file = path is not None and path.is_file()
    frames, own = traceback.format_tb(error.__traceback__), ""
    if is_in_file:
        frames = frames[-_SHOWN_FRAMES:]
    if os.environ.get("HYDRA_FULL_ERROR") != "1":
        own = excerpt(error)
    _print(f"train: error: {type(error).__name__}: {error}\n{own or ''.join(frames)}")
    where = "shows with HYDRA_FULL_ERROR=1"
    if path is not None and is_in_file:
        where = f"is in {shown_path(path)}"
    if is_in_file or own:
        print_notes([f"the whole traceback {where}"])
    print_notes(getattr(error, "__notes__", ()))
    return 1


def print_out(text: str, *, is_prose: bool = False) -> None:
    """Write to stdout; a run goes on though nobody reads what it prints."""
    with suppress(OSError):
        if is_prose:
            text = at_words(text, sys.stdout)
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def piped() -> Iterator[None]:
    """Let a reader that goes away, as `head` does, end what only shows: silently, by SIGPIPE."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def _print(text: str) -> None:
    """Write to stderr; an error may quote what stands in the environment, or a file's odd name."""
    with suppress(OSError):
        sys.stderr.write(printable_lines(without_secrets(text, os.environ)))
