"""Starts a run's local ranks, watches over them, and says in one line why they ended.

The ranks are processes of this program, started by a command and never by a function, so that a
notebook, joblib or a sweep can start them alike. They meet at a file in a private folder and talk
over the loopback interface alone.

PyTorch's own launcher is not used for the ranks of one machine: it waits 30 s before it kills what
hangs, listens on every interface, ends with code 1 for every cause and says so in sixty lines
(torch 2.13). Ranks that torchrun or srun started are joined instead: `trainer.membership`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

from trainer import durable
from trainer.board import Board, Place
from trainer.checkpoint.lock import hold
from trainer.config import RunConfig
from trainer.errors import ConfigError, RankLostError, heard
from trainer.rank import JOB_FILE, STACKS_SIGNAL, STOP_FILE, Job
from trainer.record import METRICS_FILE, recorded
from trainer.report import journal

POLL_S = 0.05

GRACE_S = 2.0
"""How long the others have to notice that a rank is lost, and to say so, before they are killed."""

ORDERLY_S = 8.0
"""How long they have where one ended with a reason of its own, which they may share."""

LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What the ranks' libraries are told, unless the user's environment says otherwise."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def supervise(config: RunConfig, folder: Path, num_ranks: int) -> int:
    """Run one command on several ranks of this machine.

    Args:
        config: composed and valid.
        folder: the run folder; it exists.
        num_ranks: at least 2.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the parallel mode knows one rank only.
        RankLostError: a rank was lost, more often than `parallel.max_restarts` allows. Another
            `TrainError` is how the run ended, where it did not end well.
    """
    if config.parallel.mode == "none":
        raise ConfigError(
            f"parallel.ranks={num_ranks}: parallel=none is one rank; use parallel=ddp"
        )
    with hold(folder), recorded(folder):
        for restart in range(config.parallel.max_restarts):
            try:
                return _attempt(config, folder, num_ranks)
            except RankLostError as error:
                config, step = _from_newest(config, folder)
                sys.stderr.write(
                    f"train: {error}; starting again after step {step} "
                    f"({restart + 1} of {config.parallel.max_restarts} restarts)\n"
                )
        return _attempt(config, folder, num_ranks)


def _from_newest(config: RunConfig, folder: Path) -> tuple[RunConfig, int]:
    """Make a config that goes on from the newest checkpoint, or from nothing if there is none."""
    from trainer.checkpoint.store import CheckpointStore  # noqa: PLC0415 - imports torch
    from trainer.checkpoint.weights import CHECKPOINTS  # noqa: PLC0415 - likewise

    steps = CheckpointStore(folder / CHECKPOINTS).steps()
    if steps:
        return config.model_copy(update={"resume": str(folder)}), steps[-1]
    journal.truncate_after(folder / METRICS_FILE, 0)
    return config, 0


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

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


@final
@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: of its process; negative for the signal that killed it.
        told: what it said of its end; empty where it could not.
        at: when, by the machine's monotonic clock.
        place: where it was.
        stopped: whether the supervisor killed it, because another rank had ended.
    """

    code: int
    told: Mapping[str, Any]
    at: float
    place: Place
    stopped: bool = False

    @property
    def rank_of_cause(self) -> int:
        """Tell how likely this end is the cause of the others; the smallest is."""
        if "error" in self.told:
            return 0
        if "crash" in self.told:
            return 1
        if "lost" in self.told:
            return 4
        if self.stopped:
            return 3
        # Collectives abort the process when they find messages they did not expect.
        return 2 if self.code == -signal.SIGABRT else 1


def _attempt(config: RunConfig, folder: Path, num_ranks: int) -> int:
    with tempfile.TemporaryDirectory(prefix="train-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        job = Job(
            config=config.model_dump(mode="json", by_alias=True),
            folder=str(folder),
            path=sys.path,
            size=num_ranks,
            supervisor=os.getpid(),
        )
        (place / JOB_FILE).write_text(json.dumps(asdict(job)))
        children: list[Child] = []
        try:
            with _forwarding(place, children):
                for rank in range(num_ranks):
                    children.append(_start(place, folder, rank, num_ranks))
                ended = _wait(children, place, config.parallel.timeout_s)
        finally:
            for child in children:
                child.signal_group(signal.SIGKILL)
                child.process.wait()
                child.board.close()
            _keep_traces(children, place, folder)
    _conclude(ended, folder, config.parallel.timeout_s)
    return 0


def _start(place: Path, folder: Path, rank: int, num_ranks: int) -> Child:
    log = None if rank == 0 else folder / "ranks" / f"rank{rank}.log"
    environment = {**LOOPBACK, **os.environ}
    # For the user's own code and for libraries that ask; the job says the same.
    environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [environment.get("PYTHONPATH")])]
    )
    if log is not None:
        durable.make_folders(log.parent)
    with (Path(os.devnull) if log is None else log).open("ab") as file:
        output = None if log is None else file
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.rank", str(place), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            # Its own session, so that Ctrl-C arrives once, through the supervisor.
            start_new_session=True,
        )
    return Child(rank=rank, process=process, board=Board(place / f"board-{rank}"), log=log)


@contextmanager
def _forwarding(place: Path, children: Sequence[Child]) -> Iterator[None]:
    """Pass the first signal to stop on to every rank; the second one stops at once.

    Yields:
        Nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        (place / STOP_FILE).touch()
        for child in children:
            # Before it notes its process it does not listen, and will look for the file.
            if child.board.read().pid:
                with suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGTERM)

    before = {each: signal.signal(each, on_signal) for each in STOPS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _wait(children: Sequence[Child], place: Path, timeout_s: float) -> dict[int, Ended]:
    """Wait for every rank, and kill those that do not follow when one ended badly."""
    ended: dict[int, Ended] = {}
    deadline = float("inf")
    while len(ended) < len(children):
        now = time.monotonic()
        running = [child for child in children if child.rank not in ended]
        for child in running:
            code = child.process.poll()
            if code is None and now < deadline:
                continue
            if code is None:
                child.signal_group(signal.SIGKILL)
                code = child.process.wait()
            found = _ended(child, code, place, stopped=now >= deadline)
            ended[child.rank] = found
            if found.code and deadline == float("inf"):
                _ask_for_stacks(child for child in running if child.rank not in ended)
            deadline = min(deadline, now + _patience(found, timeout_s))
        time.sleep(POLL_S)
    return ended


def _ended(child: Child, code: int, place: Path, *, stopped: bool) -> Ended:
    told: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        told = json.loads((place / f"end-{child.rank}.json").read_bytes())
    return Ended(
        code=code,
        told=told,
        at=told.get("at", time.monotonic()),
        place=child.board.read(),
        stopped=stopped and not told,
    )


def _patience(ended: Ended, timeout_s: float) -> float:
    """Tell how long other ranks may take to follow one."""
    if ended.code in (0, 75):
        return timeout_s
    return ORDERLY_S if "error" in ended.told else GRACE_S


def _ask_for_stacks(children: Iterator[Child]) -> None:
    for child in children:
        if child.board.read().pid:
            with suppress(ProcessLookupError):
                child.process.send_signal(STACKS_SIGNAL)


def _keep_traces(children: Sequence[Child], place: Path, folder: Path) -> None:
    """Bring stacks into the run folder, and take away logs that say nothing."""
    for child in children:
        stacks = place / f"stacks-{child.rank}.txt"
        target = folder / "errors" / f"rank{child.rank}.txt"
        if stacks.exists() and stacks.stat().st_size and not target.exists():
            durable.make_folders(target.parent)
            shutil.copyfile(stacks, target)
        if child.log is not None and child.log.exists() and not child.log.stat().st_size:
            child.log.unlink()
    with suppress(OSError):
        (folder / "ranks").rmdir()


def _conclude(ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> None:
    """Say why the ranks ended.

    Raises:
        error: the reason that one of them gave.
        RankLostError: none of them could give one.
    """
    if not any(end.code for end in ended.values()):
        return
    failed = {rank: end for rank, end in ended.items() if end.code}
    rank, end = min(failed.items(), key=lambda item: (item[1].rank_of_cause, item[1].at))
    if "error" in end.told:
        error = heard(end.told)
        shared = all(other.told.get("text") == end.told["text"] for other in failed.values())
        if rank and not shared:
            error = heard({**end.told, "text": f"rank {rank}, {end.place}: {end.told['text']}"})
        raise error
    raise RankLostError(_how(rank, end, ended, folder, timeout_s))


def _how(rank: int, end: Ended, ended: Mapping[int, Ended], folder: Path, timeout_s: float) -> str:
    if "crash" in end.told:
        return (
            f"rank {rank} failed at {end.place}: {end.told['crash']}; "
            f"its traceback is in {folder / 'errors' / f'rank{rank}.txt'}"
        )
    if end.code < 0 and not end.stopped:
        name = signal.Signals(-end.code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"rank {rank} was killed by {name}{hint}, at {end.place}"
    if end.stopped:
        # Of those that had to be killed, the one that has been where it is for longest.
        rank, end = min(
            ((r, e) for r, e in ended.items() if e.stopped), key=lambda item: item[1].place.since
        )
        stacks = folder / "errors" / f"rank{rank}.txt"
        where = f"; what it was doing is in {stacks}" if stacks.exists() else ""
        return (
            f"rank {rank} did not answer for {timeout_s:g} s (parallel.timeout_s), "
            f"at {end.place}{where}"
        )
    if not end.told:
        return f"rank {rank} ended with exit code {end.code} and without a word, at {end.place}"
    return f"rank {rank} lost the others at {end.place}: {end.told.get('lost', 'no reason')}"
