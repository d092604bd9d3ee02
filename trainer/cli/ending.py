"""How an end is said: on stderr, one line per fault; a crash in full in the run folder."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from trainer import durable
from trainer.errors import TrainError

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable, as Hydra has it: 1 shows full tracebacks."""

_SHOWN_FRAMES = 3


def rank() -> int:
    """This process among those that torchrun or a cluster started; 0 where we start our own."""
    typed = os.environ.get("RANK", "0")
    return int(typed) if typed.isdecimal() else 0


def complain(error: TrainError) -> int:
    """Say what is wrong, one line per fault, on the first rank only.

    Returns:
        The exit code.
    """
    if os.environ.get(FULL_ERROR) == "1":
        traceback.print_exception(error)
    if rank() == 0:
        for line in str(error).splitlines() or [type(error).__name__]:
            sys.stderr.write(f"train: error: {line}\n")
    return error.exit_code


def say_crash(error: Exception, folder: Path | None = None) -> int:
    """Show the end of a traceback, and write the whole into the run folder, if there is one.

    Returns:
        The exit code.
    """
    if os.environ.get(FULL_ERROR) == "1":
        traceback.print_exception(error)
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-_SHOWN_FRAMES:])
    sys.stderr.write(f"train: error: {type(error).__name__}: {error}\n{''.join(frames)}")
    if folder is None:
        sys.stderr.write(f"train: error: {FULL_ERROR}=1 shows the whole traceback\n")
        return 1
    path = folder / "errors" / f"rank{rank()}.txt"
    with suppress(OSError):
        durable.make_folders(path.parent)
        whole = "".join(traceback.format_exception(error))
        durable.write_file_atomic(path, whole.encode())
        sys.stderr.write(f"train: error: the whole traceback is in {path}\n")
    return 1
