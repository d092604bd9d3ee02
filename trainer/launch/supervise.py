"""Start ranks as processes and watch them; run a command on them again where one failed.

Each rank is a process of this program, started by a command and never by a function, so that a
notebook, joblib or a sweep can start it too. Ranks of our own talk over the loopback interface
alone. Why this is not torchrun's: docs/decisions/local-ranks.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import final

from trainer.config.command_words import READING
from trainer.config.run_config import RunConfig, to_text
from trainer.core import durable, signals
from trainer.core.errors import GO_ON, Preempted, RankFailedError
from trainer.core.own_code import OWN_CODE
from trainer.core.rank_progress import RankPosition, RankProgress
from trainer.core.run_folder import RunFolder, hold
from trainer.launch.ends import GRACE_S, STACKS_SIGNAL, Ended, Records, among_hosts, verdict
from trainer.launch.membership import Membership
from trainer.report import journal
from trainer.report.run_status import drop_empty, recorded, saved_step, to_go_on

UNBEGUN_S = 10.0  # to follow a signal before the first step, while there is nothing to save
STACKS_S = 0.3  # to dump the stacks of a rank that hangs
RANK_POLL_S = 0.05  # how often to look
LONGEST_POLL_S = 1.0  # on a busy machine; what takes longer is a job that was suspended
ORDERLY_S = 6.0  # for them where it gave a reason of its own, which they may share


def supervise(
    config: RunConfig, folder: Path, members: Sequence[Membership], stop: signals.StopFlag
) -> int:
    """Run one command on some ranks, and give the exit code; after one failed again, where allowed.

    The ranks are all of the run, or the one that a launcher meant; the run folder exists where the
    first one is. Under a launcher every process prints how its own rank ended, but for what the
    first rank of its host says as well: then `is_own` is false.
    """
    is_ours, trains = members[0].is_ours, config.command == "train"
    most, restarts = 0, 0
    if trains:
        most = config.parallel.max_restarts
    with ExitStack() as opened:
        if members[0].rank == 0 and config.command not in READING:
            opened.enter_context(hold(folder))
            opened.enter_context(recorded(config, folder))
        while True:
            try:
                _attempt(config, folder, members, stop)
                return 0
            except RankFailedError as error:
                step = saved_step(folder) if trains and is_ours else 0
                if restarts == most or stop():
                    raise
                restarts += 1
                counted = f"({restarts} of {most} restarts)"
                sys.stderr.write(f"train: {error}; starting again after step {step} {counted}\n")
            if step:
                config = config.model_copy(update={"resume": str(folder)})
            else:  # nothing is saved: the metrics begin anew
                journal.truncate_after(folder / RunFolder.METRICS, 0)


def _attempt(
    config: RunConfig, folder: Path, members: Sequence[Membership], stop: signals.StopFlag
) -> None:
    """Start the ranks once, and wait for them; raises how it ended, where it did not end well."""
    with tempfile.TemporaryDirectory(prefix="train-", ignore_cleanup_errors=True) as name:
        records, is_ours = Records(Path(name)), members[0].is_ours
        if is_ours:
            members = [replace(each, address=f"{name}/rendezvous") for each in members]
        job = {
            "config": to_text(config),
            "folder": str(folder),  # that of the first rank counts
            # Where Python looks for modules; an empty entry would be the current folder.
            "path": [*filter(None, sys.path)],
            "own_code": str(OWN_CODE.folder),
            "supervisor": os.getpid(),
            "members": {each.rank: asdict(each) for each in members},
        }
        (records.folder / Records.JOB).write_text(json.dumps(job))
        timeout_s = config.parallel.timeout_s
        unbegun = f"{signals.UNBEGUN}: {GO_ON}{to_go_on(config, folder)}"
        watch = Watch(records=records, timeout_s=timeout_s, unbegun=unbegun, stop=stop)
        try:
            for member in members:
                watch.children.append(start_rank(records, member))
            watch.run()
        finally:
            # Where a launcher started us, the first rank's folder counts, once the ranks have met.
            joined = durable.read_json(records.folder / Records.JOINED)
            place = Path(joined.get("folder", folder))
            watch.end(place)
            for member in members:
                if log := RunFolder(place).rank_log(config.command, member.rank):
                    drop_empty(log)
    error = verdict(watch.ended, place, timeout_s, socket.gethostname() * (not is_ours))
    if not is_ours:
        end, hosts = watch.ended[members[0].rank], joined.get("hosts", [])
        error = among_hosts(error, end, place, members[0].local_rank, hosts)
    if error is not None:
        raise error


@final
@dataclass(frozen=True, kw_only=True)
class Child:
    """A rank's process, and the memory where it notes its place."""

    rank: int
    process: subprocess.Popen[bytes]
    rank_progress: RankProgress

    def kill(self) -> None:
        """Kill the rank, and what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start_rank(records: Records, member: Membership) -> Child:
    """Start a rank, whose job lies in the folder of the records."""
    place, rank, size = str(records.folder), str(member.rank), str(member.size)
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    if member.is_ours:  # no launcher set the variables that user code reads
        # Else gloo and NCCL listen on whatever the host name resolves to.
        environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **environment}
        environment |= {"RANK": rank, "LOCAL_RANK": rank}
        environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # An empty entry would be the current folder.
    paths = [str(Path(__file__).parents[2]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # What a rank cannot handle yet is blocked until it can.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*signals.SIGNALS, STACKS_SIGNAL})
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.launch.rank", place, rank],
            stdin=subprocess.DEVNULL,
            env=environment,
            # Its own session, so that Ctrl-C arrives once, through the supervisor.
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    progress = RankProgress(records.rank_progress(member.rank))
    return Child(rank=member.rank, process=process, rank_progress=progress)


@final
@dataclass(kw_only=True)
class Watch:
    """Waits for the ranks of one supervisor, and ends them all when one ended badly."""

    records: Records
    timeout_s: float  # `parallel.timeout_s`
    unbegun: str  # what to say of a run that a signal ended before its first step
    stop: signals.StopFlag
    children: list[Child] = field(default_factory=list)  # the ranks; filled as they start
    ended: dict[int, Ended] = field(default_factory=dict)  # those that ended
    # Seconds for which this process ran. All limits are by this clock: while a job is suspended
    # its ranks do not run either.
    ran_s: float = 0.0
    came_at: dict[int, tuple[float, float]] = field(default_factory=dict)  # `since`, and `ran_s`
    deadline: float = float("inf")  # when what still runs is killed
    hangs: bool = False  # whether a rank came to its time limit
    # Where the others were when the first one ended badly, or hung.
    places: dict[int, RankPosition] = field(default_factory=dict)
    stopped_at: float | None = None  # when they were asked to stop

    def run(self) -> None:
        """Wait until every rank has ended; a second signal is a `KeyboardInterrupt`."""
        while len(self.ended) < len(self.children):
            began = time.monotonic()
            running = self._running()
            places = [child.rank_progress.read() for child in running]
            if self.stop():
                self._pass_on(running, places)
            if not self.places and any(map(self._is_overdue, running, places)):
                self.hangs = True
                self._note_places(running, STACKS_S)
            for child in running:
                self._look_at(child)
            time.sleep(RANK_POLL_S)
            self.ran_s += min(time.monotonic() - began, LONGEST_POLL_S)

    def _running(self) -> list[Child]:
        """Give the ranks whose end was not noted yet."""
        running = list[Child]()
        for child in self.children:
            if child.rank not in self.ended:
                running.append(child)
        return running

    def _is_overdue(self, child: Child, place: RankPosition) -> bool:
        since, came_at = self.came_at.get(child.rank, (None, 0.0))
        if since != place.since:
            came_at = self.ran_s
            self.came_at[child.rank] = place.since, came_at
        return self.ran_s - came_at > place.limit_s(self.timeout_s)

    def _pass_on(self, running: Sequence[Child], places: Sequence[RankPosition]) -> None:
        """Ask the ranks to stop, and let the next signal end them; do not wait till they begin."""
        if self.stopped_at is None:
            self.stopped_at = self.ran_s
            for each in signals.caught():
                signal.signal(each, signal.default_int_handler)
            for child in running:
                child.process.send_signal(signal.SIGTERM)
        has_waited = self.ran_s > self.stopped_at + UNBEGUN_S
        if has_waited and all((place.step, place.phase) == (0, "start") for place in places):
            raise Preempted(self.unbegun)

    def _note_places(self, running: Sequence[Child], left_s: float) -> None:
        """Note where ranks are before their stacks are asked for, which wakes stopped ones."""
        self.places = {child.rank: child.rank_progress.read() for child in running}
        self.deadline = min(self.deadline, self.ran_s + left_s)
        for child in running:
            child.process.send_signal(STACKS_SIGNAL)
            child.process.send_signal(signal.SIGCONT)

    def _look_at(self, child: Child) -> None:
        """Note that a rank ended; kill it where its time is over."""
        is_overdue = self.ran_s >= self.deadline
        if child.process.poll() is None:
            if not is_overdue:
                return
            child.kill()
        code = child.process.wait()
        end = self.records.read(child.rank)
        # What ranks say that lose each other as they are killed is no cause.
        if end is None or (self.hangs and "crash" in end.report):
            place, is_killed = child.rank_progress.read(), is_overdue or self.hangs
            # Where it was before its stacks were asked for, which may have woken it.
            if is_killed:
                place = self.places.get(child.rank, place)
            end = replace(Ended.now(child.rank, place, {}), is_killed=is_killed)
        self.ended[child.rank] = end = replace(end, code=code)
        # Those that are done, or saved, wait for each other as in a step; W&B takes some seconds.
        wait_s = max(self.timeout_s, 10.0)
        if end.has_failed and code != Preempted.exit_code:
            wait_s = GRACE_S
            # The others may share its reason, and give it as well.
            if "error" in end.report:
                wait_s = ORDERLY_S
            if not self.places:
                self._note_places(self._running(), wait_s)
        self.deadline = min(self.deadline, self.ran_s + wait_s)

    def end(self, folder: Path) -> None:
        """End what is left of the ranks, and move their stacks to the run folder.

        No stacks of one that gave a reason: it was on its way out as its stacks were asked for.
        """
        for child in self.children:
            child.kill()
        for child in self.children:
            child.process.wait()
            stacks, end = self.records.stacks(child.rank), self.ended.get(child.rank)
            dumped = _content(stacks)
            is_explained = end is not None and "error" in end.report
            # A first rank that ended may have taken its folder back.
            if dumped and not is_explained and folder.is_dir():
                # Before its traceback, if it left one: what it was at before that.
                target = RunFolder(folder).traceback(child.rank)
                durable.make_folders(target.parent)
                durable.write_file_atomic(target, dumped + _content(target))


def _content(file: Path) -> bytes:
    """Read a file; nothing where there is none."""
    return b"" if not file.exists() else file.read_bytes()
