"""Wait for every local rank of a run, and end those that do not follow when one ended badly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

from trainer.core.errors import Preempted
from trainer.core.rank_progress import Place
from trainer.launch.children import Child, ask_for_stacks
from trainer.launch.ends import Ended, Records

POLL_S = 0.05

UNBEGUN_S = 10.0
"""How long ranks have to hear a signal before the first step, while there is nothing to save."""

STACKS_S = 0.3
"""How long a rank that hangs has to dump its stacks."""

GRACE_S = 1.0
"""How long the others have to notice that a rank is lost, and to say so, before they are killed."""

ORDERLY_S = 6.0
"""How long they have where one ended with a reason of its own, which they may share."""


@final
@dataclass
class Asked:
    """Whether a signal asked to stop.

    Attributes:
        at: when the first one came, by the monotonic clock.
        at_once: whether a second one did, or nothing is to be saved.
    """

    at: float | None = None
    at_once: bool = False


@final
@dataclass(kw_only=True)
class Watch:
    """What is known of the ranks of an attempt.

    Attributes:
        children: the ranks; filled as they start.
        size: how many they are to be.
        records: what they leave.
        timeout_s: `parallel.timeout_s`.
        unbegun: what to say of a run that a signal ended before its first step.
        asked: whether a signal asked to stop.
        ended: those that ended.
        deadline: when what still runs is killed, by the monotonic clock.
        places: where the others were when the first one ended badly, or hung.
    """

    children: Sequence[Child]
    size: int
    records: Records
    timeout_s: float
    unbegun: str
    asked: Asked
    ended: dict[int, Ended] = field(default_factory=dict)
    deadline: float = float("inf")
    places: dict[int, Place] = field(default_factory=dict)

    def run(self) -> None:
        """Wait until every rank has ended.

        Raises:
            KeyboardInterrupt: a signal asked to end them at once.
            Preempted: a signal came before the first step, and they do not hear it.
        """
        while len(self.ended) < self.size:
            self._obey_signals()
            running = [child for child in self.children if child.rank not in self.ended]
            if not self.places and any(
                child.board.read().is_overdue(self.timeout_s) for child in running
            ):
                self._note_places(running)
                self.deadline = min(self.deadline, time.monotonic() + STACKS_S)
            for child in running:
                self._look_at(child)
            time.sleep(POLL_S)

    def _obey_signals(self) -> None:
        if self.asked.at_once:
            raise KeyboardInterrupt
        if self.asked.at is None or time.monotonic() < self.asked.at + UNBEGUN_S:
            return
        places = [child.board.read() for child in self.children if child.rank not in self.ended]
        if places and all((place.step, place.phase) == (0, "start") for place in places):
            raise Preempted(self.unbegun)

    def _note_places(self, running: Sequence[Child]) -> None:
        """Note where ranks are before their stacks are asked for, which wakes stopped ones."""
        self.places = {child.rank: child.board.read() for child in running}
        ask_for_stacks(running)

    def _look_at(self, child: Child) -> None:
        """Note that a rank ended; kill it where its time is over."""
        is_overdue = time.monotonic() >= self.deadline
        code = child.process.poll()
        if code is None and not is_overdue:
            return
        if code is None:
            child.kill()
            code = child.process.wait()
        place = self.places.get(child.rank) if is_overdue else None
        end = self.records.read(child.rank) or Ended.now(
            child.rank, place or child.board.read(), {}, is_killed=is_overdue
        )
        if "lost" in end.report:
            end = replace(end, place=self.places.get(child.rank, end.place))
        self.ended[child.rank] = end = replace(end, code=code)
        is_bad = end.has_failed and code != Preempted.exit_code
        if is_bad and not self.places:
            self._note_places([c for c in self.children if c.rank not in self.ended])
        grace_s = ORDERLY_S if "error" in end.report else GRACE_S
        # Those that are done, or saved, wait for each other no longer than in a step.
        wait_s = grace_s if is_bad else self.timeout_s
        self.deadline = min(self.deadline, time.monotonic() + wait_s)
