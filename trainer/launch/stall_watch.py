"""Whether a run stands still whose ranks something else started, so that no supervisor sees it.

Each rank looks at itself from a thread of its own. One that has shown no sign of life for long says
so in a file, again and again; the first rank reads these files once it stands still itself. A rank
that says nothing is taken for alive: its threads may wait for a library that lets none of them run.
While steps go on nothing is written and no table of processes read.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from trainer.core.rank_progress import Board, Place
from trainer.launch.stall import Pulse
from trainer.launch.watch import FIRST_S, LOOK_S, LOOKS, POLL_S

BUSY = 0.05
"""Share of a core that a process does not use while all of its threads are idle."""

FRESH_S = 5.0
"""How old a rank's word that it stands still may be."""


@final
@dataclass(frozen=True, kw_only=True)
class _Self:
    """This rank, as a look needs it."""

    rank: int
    pid: int
    board: Board
    is_stopped: bool = False


@final
class Lookout:
    """Looks at this rank now and then, and on the first one for all.

    Args:
        place: folder of what the ranks note.
        rank: this one.
        size: number of ranks.
        board: this rank's.
        timeout_s: how long a rank may be waited for.
    """

    def __init__(self, place: Path, rank: int, size: int, board: Board, timeout_s: float) -> None:
        self._place = place
        self._size = size
        self._me = _Self(rank=rank, pid=os.getpid(), board=board)
        self._limit_s = timeout_s + FIRST_S
        self.interval_s = min(LOOK_S, max(POLL_S, timeout_s / LOOKS))
        self._pulse = Pulse()
        self._looked = self._signed = time.monotonic()
        self._used_s = 0.0
        self._at = Place()
        self._still_s = 0.0
        self._claims: dict[int, tuple[str, float]] = {}

    def look(self) -> bool:
        """Note whether this rank stands still; on the first one, tell whether all do for long."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed < self.interval_s:
            return False
        self._looked = now
        own = self._path(self._me.rank)
        if self._lives(now):
            if self._still_s:
                with suppress(OSError):  # the run may be over, and its folder gone
                    own.unlink()
            self._still_s = 0.0
            return False
        # While this process was stopped itself, others may have been as well.
        self._still_s += min(elapsed, 2 * self.interval_s)
        if self._still_s < self._limit_s / 2:
            return False
        with suppress(OSError):
            own.write_text(f"{self._still_s:.3f}")
        if self._me.rank:
            return False
        still = [self._is_still(rank, now) for rank in range(self._size)]
        return all(still)

    def _lives(self, now: float) -> bool:
        """Whether this rank showed a sign of life since the last look."""
        # The thread that looks is left out.
        used_s = time.process_time() - time.thread_time()
        at = self._me.board.read()
        is_noted, self._at = at != self._at, at
        if not is_noted and at.waits:
            return False
        is_busy = used_s - self._used_s > BUSY * (now - self._signed)
        # The table of processes is long, and read only by a rank that seems to be idle.
        if not is_noted and not is_busy and not self._pulse.look([self._me]).moves:
            return False
        self._signed, self._used_s = now, used_s
        return True

    def _is_still(self, rank: int, now: float) -> bool:
        """Whether a rank says, and said again lately, that it has been still for long."""
        try:
            text = self._path(rank).read_text()
            still_s = float(text)
        except (OSError, ValueError):
            return False
        if self._claims.get(rank, ("",))[0] != text:
            self._claims[rank] = (text, now)
        return still_s > self._limit_s and now - self._claims[rank][1] < FRESH_S

    def _path(self, rank: int) -> Path:
        return self._place / f"still-{rank}"
