"""The ranks of this machine as processes: started, watched, asked for stacks, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from trainer.core import durable, signals
from trainer.core.rank_progress import Board, Place
from trainer.launch.rank import STACKS_SIGNAL
from trainer.report.run_status import drop_empty

LIBRARIES = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""What the ranks' libraries are told, unless the user's environment says otherwise."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface ranks talk over."""

STACKS_S = 0.5
"""How long a stopped rank runs again, at most, to write down its stacks."""


@final
@dataclass(frozen=True, kw_only=True)
class Child:
    """A rank's process.

    Attributes:
        log: its output, of other ranks than the first.
    """

    rank: int
    process: subprocess.Popen[bytes]
    board: Board
    log: Path | None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def signal(self, number: signal.Signals) -> None:
        """Send the rank a signal, unless it does not listen yet."""
        if self.board.read().pid:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def is_stopped(self) -> bool:
        """Whether something stopped the process, as SIGSTOP does; never where /proc is not."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


@final
@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: of its process; negative for the signal that killed it.
        told: what it said of its end; empty where it could not.
        at: when, by this machine's monotonic clock.
        place: where it was.
        stopped: whether the supervisor killed it, because another rank had ended.
    """

    rank: int
    code: int
    told: Mapping[str, Any]
    at: float
    place: Place
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """Whether it did not end well; a rank that is done says so."""
        return bool(self.code) or not self.told

    def to_json(self) -> dict[str, Any]:
        """Write it for another machine, whose clock is another."""
        now = time.monotonic()
        place = replace(self.place, since=now - self.place.since)
        return asdict(replace(self, at=now - self.at, place=place))

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Ended:
        """Read what another machine wrote."""
        now = time.monotonic()
        place = Place(**{**told["place"], "since": now - told["place"]["since"]})
        return cls(**{**told, "at": now - told["at"], "place": place})


def start(
    log: Path | None,
    private: Path,
    rank: int,
    environment: Mapping[str, str],
    handles: Sequence[int],
) -> Child:
    """Start a rank.

    Args:
        log: takes what it prints; None is the screen.
        private: folder of this attempt, with the job.
        rank: over all machines.
        environment: variables beside the user's own, which win over `LIBRARIES` and `INTERFACES`.
        handles: open files that it takes over.
    """
    weak = {key: value for key, value in environment.items() if key in INTERFACES}
    whole = {**LIBRARIES, **environment, **os.environ}
    whole |= {key: value for key, value in environment.items() if key not in weak}
    root = str(Path(__file__).parents[2])
    whole["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [whole.get("PYTHONPATH")])])
    if log is not None:
        durable.make_folders(log.parent)
    with (Path(os.devnull) if log is None else log).open("ab") as file, _signals_held_back():
        output = None if log is None else file
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.launch.rank", str(private), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=whole,
            pass_fds=handles,
            # Its own session, so that Ctrl-C arrives once, through the supervisor.
            start_new_session=True,
        )
    return Child(rank=rank, process=process, board=Board(private / f"board-{rank}"), log=log)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Let what starts meanwhile begin deaf to signals to stop; it listens when it can.

    Yields:
        Nothing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_of(child: Child, private: Path, code: int, place: Place, *, stopped: bool) -> Ended:
    """Read how a rank ended; its own word for it counts more than ours."""
    told: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        told = json.loads((private / f"end-{child.rank}.json").read_bytes())
    return Ended(
        rank=child.rank,
        code=code,
        told=told,
        at=told.get("at", time.monotonic()),
        place=place,
        stopped=stopped and not told,
    )


def ask_for_stacks(children: Iterable[Child], private: Path) -> None:
    """Let ranks write down where they are; what is stopped is woken for it, and stopped again."""
    woken = []
    for child in children:
        stopped = child.is_stopped
        child.signal(STACKS_SIGNAL)
        if stopped:
            child.signal(signal.SIGCONT)
            woken.append(child)
    limit = time.monotonic() + STACKS_S
    while not all(_stacks(each, private) for each in woken) and time.monotonic() < limit:
        time.sleep(0.01)
    for child in woken:
        child.signal(signal.SIGSTOP)


def end(children: Sequence[Child], private: Path, folder: Path) -> None:
    """End what is left of the ranks; keep their stacks, and no logs that say nothing."""
    for child in children:
        child.signal_group(signal.SIGKILL)
    for child in children:
        child.process.wait()
        child.board.close()
        for path in folder.glob(f"errors/{durable.UNFINISHED}rank{child.rank}.txt-*"):
            durable.discard(path)
        _keep_stacks(child, private, folder)
        if child.log is not None:
            drop_empty(child.log)


def _keep_stacks(child: Child, private: Path, folder: Path) -> None:
    """Put a rank's stacks where its traceback is, if it has one: what it was at before that."""
    if _stacks(child, private):
        target = folder / "errors" / f"rank{child.rank}.txt"
        durable.make_folders(target.parent)
        before = target.read_bytes() if target.exists() else b""
        stacks = (private / f"stacks-{child.rank}.txt").read_bytes()
        durable.write_file_atomic(target, stacks + before)


def _stacks(child: Child, private: Path) -> int:
    """Count the bytes that a rank wrote of its stacks."""
    path = private / f"stacks-{child.rank}.txt"
    return path.stat().st_size if path.exists() else 0
