"""Runs as one of the ranks that torchrun, srun or a cluster's job started.

No supervisor of ours watches them. What one would know lies in a folder of files in the run folder,
which all ranks share: where each rank is, and how it ended. The first rank reads them when the run
ends badly, and says why, once; where it is itself what was lost, the first one to notice does.
"""

from __future__ import annotations

import faulthandler
import json
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
from trainer.config.run_config import RunConfig
from trainer.core import durable
from trainer.core.errors import ConfigError, RankLostError, TrainError
from trainer.core.launcher import Membership
from trainer.core.rank_progress import Board, Place
from trainer.core.signals import StopFlag
from trainer.core.world import World
from trainer.launch import session
from trainer.launch.children import Ended
from trainer.launch.rank import told_of
from trainer.launch.stall_watch import Lookout
from trainer.launch.verdict import WAITED, verdict
from trainer.report.run_status import last_step, rank_log, recorded

HEARING_S = 2.0
"""How long a rank that lost another looks for what that one said of its end."""

POLL_S = 0.05

WATCH_S = 0.5
"""How often a rank looks whether the run is over."""

ENDING_S = 4.0
"""How long it has to end when it is."""

SPEAKER = "speaker"
"""File that the rank makes which says why the run ended."""

STILL = "still"
"""File that the first rank makes when all ranks stand still."""

STACKS_S = 1.0
"""How long the others have then to write down their stacks."""


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
    session.settle_bits(config)
    try:
        session.choose_device(config, member.local_rank)
    except ConfigError as error:
        # Machines differ: one rank of each says it.
        error.is_own = member.local_rank in (0, torch.cuda.device_count())
        raise
    with _missed(config, folder, member), session.joined(config, member) as world:
        folder = session.agreed(config, folder, world)
        with session.filed(rank_log(config, folder, world.rank)), ExitStack() as held:
            if config.command not in session.READING:
                world.on_main(lambda: held.enter_context(hold(folder)))
                if world.is_main:
                    held.enter_context(recorded(folder))
            seat = held.enter_context(_seated(config, folder, world))
            with _answering(seat):
                code = session.run_rank(config, folder, seat.world, stop)
                world.barrier()
            return code


@final
@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank among others that may ask what became of it.

    Attributes:
        world: all ranks; its board is in `place`.
        folder: the run folder.
        place: folder of what the ranks note.
        saves: whether the run folder's status is this run's.
        timeout_s: how long a rank may be waited for.
    """

    world: World
    folder: Path
    place: Path
    saves: bool
    timeout_s: float

    def where(self, rank: int) -> Place:
        """Tell where a rank is, or was."""
        path = self.place / f"board-{rank}"
        return Board(path).read() if path.exists() else Place()

    def note(self, end: Ended) -> None:
        """Leave word of this rank's end; nobody asks for it where the folder is gone."""
        with suppress(OSError, TrainError):
            content = {**end.to_json(), "written": time.time()}
            durable.write_json(self.place / f"end-{end.rank}.json", content)

    def noted(self) -> dict[int, Ended]:
        """Read what ranks said of their ends."""
        ended = {}
        for rank in range(self.world.size):
            with suppress(OSError, ValueError):
                told: dict[str, Any] = json.loads((self.place / f"end-{rank}.json").read_bytes())
                late = time.time() - told.pop("written")
                end = Ended.from_json(told)
                place = replace(end.place, since=end.place.since - late)
                ended[rank] = replace(end, at=end.at - late, place=place)
        return ended

    def claim(self) -> bool:
        """Take it upon this rank to say why the run ended, unless another one does."""
        try:
            (self.place / SPEAKER).touch(exist_ok=False)
        except OSError:
            return False
        return True


@contextmanager
def _missed(config: RunConfig, folder: Path, member: Membership) -> Iterator[None]:
    """Say and record that ranks did not meet, or lost each other before they agreed on a run.

    Raises:
        RankLostError: they did.
    """
    try:
        with session.losses_told(member.rank):
            yield
    except RankLostError as error:
        status = folder / FILE_NAME
        if member.rank == 0 and config.command not in session.READING and not status.exists():
            write_status(
                folder, Status(state="failed", exit_code=error.exit_code, reason=str(error))
            )
        raise


@contextmanager
def _seated(config: RunConfig, folder: Path, world: World) -> Iterator[Seat]:
    """Give a rank its board where the others can read it.

    Yields:
        Its seat.

    Raises:
        ConfigError: the first rank's run folder is not on this machine.
        save_error: a `SaveError`: it cannot be written to.
    """
    place = Path(world.on_main(lambda: _make_place(folder)))
    try:
        world.on_all(lambda: _find(place, world.rank))
        board = Board(place / f"board-{world.rank}")
        board.write(Place(pid=os.getpid()))
        yield Seat(
            world=replace(world, board=board),
            folder=folder,
            place=place,
            saves=config.command not in session.READING,
            timeout_s=config.parallel.timeout_s,
        )
    finally:
        if world.is_main:
            shutil.rmtree(place, ignore_errors=True)


def _make_place(folder: Path) -> str:
    try:
        return tempfile.mkdtemp(prefix=f"{durable.UNFINISHED}ranks-", dir=folder)
    except OSError as error:
        raise durable.save_error(error, folder) from error


def _find(place: Path, rank: int) -> None:
    try:
        Board(place / f"board-{rank}").close()
    except FileNotFoundError as error:
        raise ConfigError(
            f"outputs: {place.parent} of rank 0 is not where rank {rank} is; type a folder on a "
            "file system that all nodes share"
        ) from error
    except OSError as error:
        raise durable.save_error(error, place) from error


@contextmanager
def _answering(seat: Seat) -> Iterator[None]:
    """Leave word of how this rank ends, and say why the run did where nobody else does.

    Yields:
        Nothing.

    Raises:
        TrainError: why it ended: on the rank that says it, for the run; on another, for the rank.
        KeyboardInterrupt: as raised inside.
    """
    world = seat.world
    try:
        with _ending(seat):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        told = told_of(error, seat.folder, world.rank)
        end = Ended(
            rank=world.rank,
            code=told["code"],
            told=told,
            at=time.monotonic(),
            place=seat.where(world.rank),
        )
        seat.note(end)
        if not _speaks(seat, told):
            raise error if isinstance(error, TrainError) else _quiet(told) from error
        why = _why(seat, end)
        if isinstance(error, TrainError) and str(why) == str(error):
            raise
        why.is_own = True
        if world.rank and seat.saves:
            _record(seat, why)
        raise why from error


@contextmanager
def _ending(seat: Seat) -> Iterator[None]:
    """End this process, should it hang, some time after another rank said that the run is over.

    On the first rank, also when no rank has shown a sign of life for as long as one may be waited
    for.

    Yields:
        Nothing.
    """
    done, speaking = threading.Event(), threading.Lock()
    board = seat.world.board
    assert board is not None
    lookout = Lookout(seat.place, seat.world.rank, seat.world.size, board, seat.timeout_s)

    def watch() -> None:
        while not _is_over(seat):
            if done.wait(min(WATCH_S, lookout.interval_s)):
                return
            if lookout.look():
                with speaking:
                    if not done.is_set():
                        _give_up(seat)
        _end_with_it(seat, done)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        # Whoever gives the run up holds it until the end of this process.
        with speaking:
            done.set()


def _is_over(seat: Seat) -> bool:
    return not seat.place.exists() or (seat.place / SPEAKER).exists()


def _end_with_it(seat: Seat, done: threading.Event) -> None:
    """End this process after the run, unless it ends itself in time."""
    is_still = (seat.place / STILL).exists()
    if is_still:
        _leave_stacks(seat)
    limit = time.monotonic() + ENDING_S
    while time.monotonic() < limit and (seat.place.exists() or not is_still):
        if done.wait(POLL_S):
            return
    if not is_still:
        _leave_stacks(seat)
    os._exit(RankLostError.exit_code)


def _give_up(seat: Seat) -> None:
    """End a run that stands still, in a thread: nothing is to be expected of the others."""
    (seat.place / STILL).touch()
    if not seat.claim():
        return
    _leave_stacks(seat)
    time.sleep(STACKS_S)
    own = Ended(rank=0, code=1, told={}, at=time.monotonic(), place=seat.where(0), stopped=True)
    silent = {rank: _silent(seat, rank, waited=True) for rank in range(1, seat.world.size)}
    why = verdict({0: own, **silent}, seat.folder, seat.timeout_s)
    assert why is not None
    if seat.saves:
        _record(seat, why)
    shutil.rmtree(seat.place, ignore_errors=True)
    with suppress(OSError):
        sys.stderr.write(f"train: error: {why}\n")
        sys.stderr.flush()
    os._exit(why.exit_code)


def _leave_stacks(seat: Seat) -> None:
    """Write down where the threads of this rank are."""
    with suppress(OSError):
        path = seat.folder / "errors" / f"rank{seat.world.rank}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file)


def _speaks(seat: Seat, told: dict[str, Any]) -> bool:
    """Tell whether this rank says why the run ended: the first one does, if it is still there."""
    if seat.world.is_main:
        seat.claim()
        return True
    if "lost" not in told:
        # The first rank is about to notice, and reads it.
        return False
    limit = time.monotonic() + HEARING_S
    while time.monotonic() < limit:
        if not seat.place.exists() or (seat.place / SPEAKER).exists():
            return False
        time.sleep(POLL_S)
    return seat.claim()


def _quiet(told: dict[str, Any]) -> RankLostError:
    return RankLostError(str(told.get("crash") or told.get("lost")))


def _why(seat: Seat, own: Ended) -> TrainError:
    """Find out why the run ended.

    Args:
        seat: of the rank that says it.
        own: how it ended itself.
    """
    if "lost" not in own.told:
        ended = {own.rank: own}
    else:
        limit = time.monotonic() + HEARING_S
        while True:
            ended = {**seat.noted(), own.rank: own}
            is_known = any("lost" not in end.told for end in ended.values())
            if is_known or len(ended) == seat.world.size or time.monotonic() > limit:
                break
            time.sleep(POLL_S)
    waited = WAITED in own.told.get("lost", "")
    for rank in range(seat.world.size):
        if rank not in ended:
            ended[rank] = _silent(seat, rank, waited=waited)
    why = verdict(ended, seat.folder, seat.timeout_s)
    assert why is not None
    return why


def _silent(seat: Seat, rank: int, *, waited: bool) -> Ended:
    """Take a rank that said nothing for one that hangs, or else for one that is gone."""
    place = seat.where(rank)
    told = {} if waited else {"gone": f"rank {rank} was lost at {place}: killed, or out of reach"}
    return Ended(rank=rank, code=1, told=told, at=time.monotonic(), place=place, stopped=waited)


def _record(seat: Seat, why: TrainError) -> None:
    """Write the status of a run whose first rank cannot."""
    with suppress(OSError, TrainError):
        write_status(
            seat.folder,
            Status(
                state="failed",
                exit_code=why.exit_code,
                step=last_step(seat.folder),
                reason=str(why).splitlines()[0],
            ),
        )
    shutil.rmtree(seat.place, ignore_errors=True)
