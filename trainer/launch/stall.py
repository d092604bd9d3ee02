"""Whether a run stands still, by what its ranks note and by what the system says of them.

Within a step ranks wait for each other as long as collectives do. Outside of steps one may work
alone for hours, as rank 0 does when it tunes, or when a model's constructor downloads weights. What
tells work from a hang, in a step and outside, is a sign of life: a new note on the board, a thread
that computes in the rank or in what it started, bytes that it reads or writes, or a disk that keeps
it waiting. A host that waits for a GPU computes, because CUDA spins unless it is told to block; one
that was told needs a `parallel.timeout_s` above its longest step, as NCCL's collectives do anyway.
Where the system has no table of processes, whatever runs is taken for alive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from trainer.core.rank_progress import Board, Phase, Place

TOGETHER: tuple[Phase, ...] = ("agree", "reduce")
"""Phases of a step that are nothing but collectives."""

QUIET = 0.01
"""Share of a core that an idle thread may use without being taken for work: those of gloo wake a
hundred times a second."""

PROCESSES = Path("/proc")


class Watched(Protocol):
    """A rank on this machine, as far as a look needs to know it."""

    @property
    def rank(self) -> int:
        """Over all machines."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def board(self) -> Board:
        """Where it notes its place."""

    @property
    def is_stopped(self) -> bool:
        """Whether something stopped the process, as SIGSTOP does."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a look at the ranks of one machine showed.

    Attributes:
        moves: whether one noted something, or one that does not wait shows another sign of life.
        waited_s: for how long one has waited for what another does alone.
        works: one that does not wait, and where it is; empty where all do.
        held_s: for how long one has been in a collective of its step.
        is_apart: whether another is not in one.
    """

    moves: bool
    waited_s: float
    works: str
    held_s: float
    is_apart: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank had done at its last sign of life.

    Attributes:
        at: when that was, by the monotonic clock.
        moved_bytes: that it had read and written.
        seconds: of processor time, by thread and for all children that ended.
    """

    at: float
    moved_bytes: int
    seconds: Mapping[str, float]


@final
@dataclass(kw_only=True)
class Pulse:
    """Looks at the ranks of one machine.

    Attributes:
        places: what each rank's board said.
        signs: the last sign of life of each rank since a board said something new.
    """

    places: dict[int, Place] = field(default_factory=dict)
    signs: dict[int, Sign] = field(default_factory=dict)

    def look(self, children: Iterable[Watched]) -> Sight:
        """See which ranks wait, and whether those that do not do anything else.

        Args:
            children: the ranks that run.
        """
        places = {child: child.board.read() for child in children}
        now = time.monotonic()
        waiting = {child: place for child, place in places.items() if waits(child, place)}
        others = {child: place for child, place in places.items() if child not in waiting}
        held = [now - place.since for place in others.values() if place.phase in TOGETHER]
        longest = min(others, key=lambda child: others[child].since, default=None)
        return Sight(
            moves=self._is_noted(places) or self._is_alive(others),
            waited_s=max((now - place.since for place in waiting.values()), default=0.0),
            works=f"rank {longest.rank}, which computes at {others[longest]}" if longest else "",
            held_s=max(held, default=0.0),
            is_apart=len(others) > len(held),
        )

    def _is_noted(self, places: Mapping[Watched, Place]) -> bool:
        """Whether a board says something new."""
        before, self.places = self.places, {child.rank: at for child, at in places.items()}
        if self.places == before:
            return False
        self.signs.clear()
        return True

    def _is_alive(self, children: Iterable[Watched]) -> bool:
        table = processes()
        living = [self._lives(child, table) for child in children]
        return any(living) or not table

    def _lives(self, child: Watched, table: Mapping[int, Process]) -> bool:
        """Whether a rank showed a sign of life since its last one; the first look cannot tell."""
        if child.is_stopped or child.pid not in table:
            return False
        leader, now = child.pid, time.monotonic()
        seconds, blocked = _spent(family_of(leader, table))
        sign = Sign(at=now, moved_bytes=_moved_bytes(leader), seconds=seconds)
        last = self.signs.setdefault(child.rank, sign)
        if blocked or _is_further(last, sign):
            self.signs[child.rank] = sign
            return True
        return False


def _is_further(last: Sign, sign: Sign) -> bool:
    if last.moved_bytes != sign.moved_bytes:
        return True
    least = QUIET * (sign.at - last.at)
    return any(used - last.seconds.get(key, 0.0) > least for key, used in sign.seconds.items())


def waits(child: Watched, place: Place) -> bool:
    """Whether a rank waits for others, and not they for it, since something stopped it there."""
    return place.waits and not child.is_stopped


@final
@dataclass(frozen=True, slots=True)
class Process:
    """A line of the system's table.

    Attributes:
        parent: process id.
        session: id of the session.
    """

    parent: int
    session: int


def processes() -> dict[int, Process]:
    """Read the system's table of processes; empty where it has none to read."""
    lines = ((entry.parent.name, _words(entry)) for entry in PROCESSES.glob("[0-9]*/stat"))
    return {int(pid): Process(int(words[1]), int(words[3])) for pid, words in lines if words}


def family_of(leader: int, table: Mapping[int, Process]) -> set[int]:
    """Find a process and all that it started, as far as they still are in its session or below."""
    family = {pid for pid, process in table.items() if leader in (pid, process.session)}
    size = 0
    while size < len(family):
        size = len(family)
        family |= {pid for pid, process in table.items() if process.parent in family}
    return family


def _spent(family: Iterable[int]) -> tuple[dict[str, float], bool]:
    """Tell what processor time threads used, and whether one is in a wait that no signal ends.

    Such are those for a disk or a driver. The thread that asks is left out.
    """
    seconds, blocked, own_id = {}, False, str(threading.get_native_id())
    per_second = os.sysconf("SC_CLK_TCK")
    for pid in family:
        for entry in PROCESSES.glob(f"{pid}/task/[0-9]*/stat"):
            words = _words(entry)
            if words and entry.parent.name != own_id:
                own, children = (sum(map(int, words[at : at + 2])) for at in (11, 13))
                seconds[entry.parent.name] = own / per_second
                seconds[f"children of {pid}"] = children / per_second
                blocked |= words[0] == "D"
    return seconds, blocked


def _moved_bytes(pid: int) -> int:
    """Count what a process read and wrote, in threads that ended too, but for the one that asks."""
    whole, own = (
        _text(PROCESSES / str(pid) / place / "io")
        for place in ("", f"task/{threading.get_native_id()}")
    )
    # What the first of them takes to read counts in the second.
    return _bytes_of(whole) + len(whole) * bool(own) - _bytes_of(own)


def _bytes_of(io: str) -> int:
    return sum(int(line.split()[1]) for line in io.splitlines()[:2])


def _text(path: Path) -> str:
    """Read a file of the table; empty if it is gone, or another's."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _words(stat: Path) -> list[str]:
    """Read a line of the table after the name, which may hold anything; empty if it is gone."""
    return _text(stat).rpartition(")")[2].split()
