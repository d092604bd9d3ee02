"""Start the ranks of this machine as processes, ask them for their stacks, end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.core import durable, signals
from trainer.core.rank_progress import Board
from trainer.launch.ends import Records
from trainer.launch.rank import STACKS_SIGNAL
from trainer.report.run_status import drop_empty

DEFAULTS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Else gloo and NCCL listen on whatever the host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Variables of the ranks, where the user's environment does not set them."""


@final
@dataclass(frozen=True, kw_only=True)
class Child:
    """A rank's process.

    Attributes:
        board: where it notes its place.
        log: its output; None is the screen, which the first rank has.
    """

    rank: int
    process: subprocess.Popen[bytes]
    board: Board
    log: Path | None

    def signal(self, number: signal.Signals) -> None:
        """Send the rank a signal, unless it does not listen yet and would be killed by it."""
        if self.board.read().pid:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the rank, and what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(log: Path | None, records: Records, rank: int, environment: Mapping[str, str]) -> Child:
    """Start a rank.

    Args:
        log: takes what it prints; None is the screen.
        records: of this attempt, with the job.
        rank: number of it.
        environment: variables that win over the user's own.
    """
    whole = {**DEFAULTS, **os.environ, **environment}
    root = str(Path(__file__).parents[2])
    whole["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [whole.get("PYTHONPATH")])])
    if log is not None:
        durable.make_folders(log.parent)
    # A rank starts with signals blocked, and unblocks them when it can hear them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    try:
        with (log or Path(os.devnull)).open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.launch.rank", str(records.folder), str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=file if log else None,
                stderr=file if log else None,
                env=whole,
                # Its own session, so that Ctrl-C arrives once, through the supervisor.
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Child(rank=rank, process=process, board=Board(records.board(rank)), log=log)


def ask_for_stacks(children: Iterable[Child]) -> None:
    """Let ranks dump their stacks; one that is stopped, as by SIGSTOP, goes on to do so."""
    for child in children:
        child.signal(STACKS_SIGNAL)
        child.signal(signal.SIGCONT)


def end(children: Sequence[Child], records: Records, folder: Path) -> None:
    """End what is left of the ranks; keep their stacks, and no logs that say nothing."""
    for child in children:
        child.kill()
    for child in children:
        child.process.wait()
        child.board.close()
        errors = folder / "errors"
        for path in errors.glob(f"{durable.UNFINISHED}rank{child.rank}.txt-*"):
            durable.discard(path)
        stacks = records.stacks(child.rank)
        if stacks.exists() and (dumped := stacks.read_bytes()):
            # Before its traceback, if it left one: what it was at before that.
            target = errors / f"rank{child.rank}.txt"
            durable.make_folders(errors)
            left = target.read_bytes() if target.exists() else b""
            durable.write_file_atomic(target, dumped + left)
        if child.log is not None:
            drop_empty(child.log)
