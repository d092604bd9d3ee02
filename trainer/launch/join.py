"""Run as one of the ranks that torchrun or srun started.

No supervisor of ours watches them. What one would know lies in a folder in the run folder, which
all ranks share: where each rank is, and how it ended. The first rank reads it when the run ends
badly, and says why, once; where it is itself what was lost, the first one to notice does. A thread
of each rank ends it where it hangs, or does not end though the run is over.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from trainer.checkpoint.lock import hold
from trainer.checkpoint.status import FILE_NAME, Status, write_status
from trainer.config.keys import digests
from trainer.config.run_config import RunConfig, to_plain
from trainer.core import durable
from trainer.core.errors import ConfigError, RankLostError, TrainError
from trainer.core.launcher import Membership, is_peer_failure
from trainer.core.rank_progress import Board, Place
from trainer.core.signals import StopFlag
from trainer.core.world import World
from trainer.launch import session
from trainer.launch.ends import Ended, Records, describe_end, verdict
from trainer.report.run_status import drop_empty, last_step, rank_log, recorded

HEARING_S = 2.0
"""How long a rank that lost another looks for what that one wrote of its end."""

POLL_S = 0.05

WATCH_S = 0.5
"""How often a rank looks whether it hangs, or the run is over."""

ENDING_S = 4.0
"""How long it has to end by itself when it is."""

SPEAKER = "speaker"
"""File that the rank makes which says why the run ended."""


@final
@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank among others that may ask what became of it.

    Attributes:
        world: all ranks; its board is in `records`.
        folder: the run folder.
        records: what the ranks leave.
        owns_status: whether the run folder's status is this run's.
        timeout_s: `parallel.timeout_s`.
    """

    world: World
    folder: Path
    records: Records
    owns_status: bool
    timeout_s: float

    @property
    def is_over(self) -> bool:
        """Whether a rank said why the run ended, or the first one left."""
        place = self.records.folder
        return not place.exists() or (place / SPEAKER).exists()

    def end(self, report: dict[str, Any], *, is_killed: bool = False) -> Ended:
        """Leave a record of this rank's end."""
        rank = self.world.rank
        end = Ended.now(rank, self.records.place(rank), report, is_killed=is_killed)
        self.records.write(end)
        return end

    def claim(self) -> bool:
        """Take it upon this rank to say why the run ended, unless another one does."""
        try:
            (self.records.folder / SPEAKER).touch(exist_ok=False)
        except OSError:
            return False
        return True

    def dump_stacks(self) -> None:
        """Write down where the threads of this rank are."""
        with suppress(OSError):
            path = self.folder / "errors" / f"rank{self.world.rank}.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file)

    def write_status(self, why: TrainError) -> None:
        """Write the status of a run whose first rank cannot, and take the records away."""
        if self.owns_status:
            with suppress(OSError, TrainError):
                step, reason = last_step(self.folder), str(why).splitlines()[0]
                status = Status(state="failed", exit_code=why.exit_code, step=step, reason=reason)
                write_status(self.folder, status)
        shutil.rmtree(self.records.folder, ignore_errors=True)


def join(config: RunConfig, folder: Path, stop: StopFlag, member: Membership) -> int:
    """Run one command as one of several ranks.

    Args:
        config: composed and valid.
        folder: the run folder; it exists on the first rank, and the first rank's counts.
        stop: whether a signal asked to stop at the next step boundary.
        member: this process's place among the ranks.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the command line asks for another number of ranks.
        TrainError: how the run ended, where it did not end well. Of one that this rank alone can
            tell, `is_own` is true.
    """
    if config.parallel.ranks not in ("auto", member.local_size):
        raise ConfigError(
            f"parallel.ranks={config.parallel.ranks}: whatever started this rank started "
            f"{member.local_size} on this machine; leave parallel.ranks out to join them"
        )
    try:
        session.choose_device(config, member.local_rank)
    except ConfigError as error:
        # Machines differ: one rank of each says it.
        error.is_own = member.local_rank in (0, torch.cuda.device_count())
        raise
    with _report_peer_failure(config, folder, member.rank), session.joined(config, member) as world:
        folder = _agree(config, folder, world)
        with _redirected(rank_log(config, folder, world.rank)), ExitStack() as opened:
            if config.command not in session.READING:
                world.on_main(lambda: opened.enter_context(hold(folder)))
                if world.is_main:
                    opened.enter_context(recorded(folder))
            seat = opened.enter_context(_seated(config, folder, world))
            with _reporting(seat):
                code = session.run_rank(config, folder, seat.world, stop)
                world.barrier()
            return code


@contextmanager
def _report_peer_failure(config: RunConfig, folder: Path, rank: int) -> Iterator[None]:
    """Record in one line that ranks did not come, or lost each other before or after the run.

    Raises:
        RankLostError: they did.
        RuntimeError: as raised inside, where it is anything else.
    """
    try:
        try:
            yield
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            text = " ".join(str(error).split())
            lost = RankLostError(f"rank {rank} lost another rank outside of the run: {text:.200}")
            # The first rank says it too, unless it is what was lost.
            lost.is_own = rank == 1
            raise lost from error
    except RankLostError as error:
        status = folder / FILE_NAME
        if rank == 0 and config.command not in session.READING and not status.exists():
            reason = str(error)
            write_status(folder, Status(state="failed", exit_code=error.exit_code, reason=reason))
        raise


def _agree(config: RunConfig, folder: Path, world: World) -> Path:
    """Take the first rank's folder, and refuse ranks that were given another config. Collective.

    Raises:
        ConfigError: the ranks differ; the line names the keys.
    """
    answers = world.collect({"folder": str(folder), "config": digests(to_plain(config))})
    first = answers[0]["config"]
    for rank, answer in enumerate(answers):
        own = answer["config"]
        differing = sorted(k for k in own.keys() | first.keys() if own.get(k) != first.get(k))
        if differing:
            raise ConfigError(
                f"{', '.join(differing)}: rank {rank} was given another value than rank 0; type "
                "the same command on every node"
            )
    return Path(answers[0]["folder"])


@contextmanager
def _redirected(log: Path | None) -> Iterator[None]:
    """Send what this process and those it starts print to a file, as of local ranks.

    What is said of its end still goes where the launcher wants it.

    Args:
        log: None is the screen.
    """
    if log is None:
        yield
        return
    durable.make_folders(log.parent)
    before = [os.dup(number) for number in (1, 2)]
    try:
        with log.open("ab") as file:
            _point([file.fileno()] * 2)
        yield
    finally:
        _point(before)
        for handle in before:
            os.close(handle)
        drop_empty(log)


def _point(handles: list[int]) -> None:
    """Let standard output and standard error lead elsewhere from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, handle in enumerate(handles, 1):
        os.dup2(handle, number)


@contextmanager
def _seated(config: RunConfig, folder: Path, world: World) -> Iterator[Seat]:
    """Give a rank its board where the others can read it. Collective.

    Yields:
        The rank among the others.

    Raises:
        ConfigError: the first rank's run folder is not on this machine.
        save_error: a `SaveError`: it cannot be written to.
    """

    def make() -> str:
        try:
            return tempfile.mkdtemp(prefix=f"{durable.UNFINISHED}ranks-", dir=folder)
        except OSError as error:
            raise durable.save_error(error, folder) from error

    records = Records(Path(world.on_main(make)))

    def find() -> None:
        try:
            Board(records.board(world.rank)).close()
        except FileNotFoundError as error:
            raise ConfigError(
                f"outputs: {folder} of rank 0 is not where rank {world.rank} is; type a folder on "
                "a file system that all nodes share"
            ) from error
        except OSError as error:
            raise durable.save_error(error, records.folder) from error

    try:
        world.on_all(find)
        board = Board(records.board(world.rank))
        board.write(Place(pid=os.getpid()))
        yield Seat(
            world=replace(world, board=board),
            folder=folder,
            records=records,
            owns_status=config.command not in session.READING,
            timeout_s=config.parallel.timeout_s,
        )
    finally:
        if world.is_main:
            shutil.rmtree(records.folder, ignore_errors=True)


@contextmanager
def _reporting(seat: Seat) -> Iterator[None]:
    """Record how this rank ends, and say why the run did where nobody else does.

    Raises:
        RankLostError: what this rank noticed, where another one says why.
        TrainError: why the run ended, on the rank that says it.
        KeyboardInterrupt: as raised inside.
    """
    rank = seat.world.rank
    try:
        with _watched(seat):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        end = seat.end(describe_end(error, seat.folder, rank))
        if not _is_to_say_why(seat, end):
            if isinstance(error, TrainError):
                raise
            raise RankLostError(end.report.get("crash") or end.report.get("lost")) from error
        why = _find_why(seat, end)
        if isinstance(error, TrainError) and str(why) == str(error):
            raise
        why.is_own = True
        if rank:
            seat.write_status(why)
        raise why from error


@contextmanager
def _watched(seat: Seat) -> Iterator[None]:
    """End this process where it hangs, or some time after another rank said that the run is over.

    A rank that is stopped, or whose Python threads cannot run, is left to its launcher, which ends
    it when the others have ended.
    """
    done, ending = threading.Event(), threading.Lock()
    board = seat.world.board
    assert board is not None

    def watch() -> None:
        while not done.wait(min(WATCH_S, seat.timeout_s / 4)):
            if seat.is_over and not done.wait(ENDING_S):
                seat.dump_stacks()
                os._exit(RankLostError.exit_code)
            if board.read().is_overdue(seat.timeout_s):
                with ending:
                    if not done.is_set():
                        _give_up(seat)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        # Whoever gives the run up holds it until the end of this process.
        with ending:
            done.set()


def _give_up(seat: Seat) -> None:
    """End a rank that hangs or waits for one that does, in a thread beside it."""
    seat.dump_stacks()
    end = seat.end({}, is_killed=True)
    if _is_to_say_why(seat, end):
        why = _find_why(seat, end)
        seat.write_status(why)
        with suppress(OSError):
            sys.stderr.write(f"train: error: {why}\n")
            sys.stderr.flush()
    os._exit(RankLostError.exit_code)


def _is_to_say_why(seat: Seat, end: Ended) -> bool:
    """Tell whether this rank says why the run ended: the first one does, if it is still there."""
    if seat.world.is_main:
        seat.claim()
        return True
    if "lost" not in end.report and not end.is_killed:
        # The first rank is about to notice, and reads it.
        return False
    limit = time.monotonic() + HEARING_S
    while time.monotonic() < limit:
        if seat.is_over:
            return False
        time.sleep(POLL_S)
    return seat.claim()


def _find_why(seat: Seat, own: Ended) -> TrainError:
    """Find out why the run ended.

    Args:
        seat: of the rank that says it.
        own: how it ended itself.
    """
    ended = {own.rank: own}
    limit = time.monotonic() + HEARING_S
    while not any("lost" not in end.report and not end.is_killed for end in ended.values()):
        if len(ended) == seat.world.size or time.monotonic() > limit:
            break
        time.sleep(POLL_S)
        found = (seat.records.read(rank) for rank in range(seat.world.size))
        ended = {**{end.rank: end for end in found if end is not None}, own.rank: own}
    waited = own.is_killed or own.has_timed_out
    for rank in range(seat.world.size):
        if rank not in ended:
            # One that left nothing hangs, where this rank waited for it; else it is gone.
            place = seat.records.place(rank)
            gone = f"rank {rank} was lost at {place}: killed, or out of reach"
            report = {} if waited else {"gone": gone}
            ended[rank] = Ended.now(rank, place, report, is_killed=waited)
    why = verdict(ended, seat.folder, seat.timeout_s)
    assert why is not None
    return why
