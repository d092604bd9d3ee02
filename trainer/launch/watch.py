"""Waits for every rank of a run, and ends those that do not follow when one ended badly."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from trainer.core.errors import Preempted
from trainer.core.rank_progress import Place
from trainer.launch.children import Child, Ended, ask_for_stacks, end_of
from trainer.launch.nodes import Link, Nodes
from trainer.launch.stall import Pulse, Sight, waits

POLL_S = 0.05

LOOKS = 20
"""How often ranks are looked at within the time that one may be waited for..."""

LOOK_S = 1.0
"""...and at least, in seconds."""

FIRST_S = 0.5
"""How long collectives that reached the same limit have to say so first: they know who waited."""

WORK_S = 10.0
"""How long ranks wait at least before a line says for whom: imports alone may take as long."""

UNBEGUN_S = 10.0
"""How long ranks have to hear a signal before the first step, while there is nothing to save."""

STACKS_S = 0.2
"""How long a rank that hangs has to write down its stacks."""

GRACE_S = 1.0
"""How long the others have to notice that a rank is lost, and to say so, before they are killed."""

ORDERLY_S = 6.0
"""How long they have where one ended with a reason of its own, which they may share."""


@final
@dataclass
class Asked:
    """Whether a signal asked this supervisor to stop.

    Attributes:
        at: when the first one came, by the monotonic clock.
        at_once: whether a second one did, or nothing is to be saved.
    """

    at: float | None = None
    at_once: bool = False


@final
@dataclass(kw_only=True)
class Watch:
    """One machine's view of the ranks.

    Attributes:
        children: the ranks of this machine; filled as they start.
        private: folder of this attempt.
        others: the other machines' supervisors.
        expected: ranks to wait for: on the first machine all, on another its own.
        ranks_of: gives the ranks of a machine.
        timeout_s: how long a rank may be waited for.
        unbegun: what to say of a run that a signal ended before its first step.
        asked: whether a signal asked to stop.
        asked_elsewhere: when another machine said that one came there, by the monotonic clock.
        told: whether the first machine was told that one came here.
        ended: those that ended.
        over: what the first machine said, to another, of the end of the run.
        deadline: when what still runs is killed, by the monotonic clock.
        then: where the others were when the first one ended badly.
        pulse: of the ranks of this machine.
        sights: the last look at each machine.
        looked: when that was, by the monotonic clock.
        still_s: for how long the run has stood still.
        tell: takes a line for the user.
        told_of_work: whether it took the one about a rank that is waited for.
    """

    children: Sequence[Child]
    private: Path
    others: Nodes
    expected: range
    ranks_of: Callable[[int], range]
    timeout_s: float
    unbegun: str = ""
    asked: Asked = field(default_factory=Asked)
    asked_elsewhere: float | None = None
    told: bool = False
    ended: dict[int, Ended] = field(default_factory=dict)
    over: dict[str, Any] | None = None
    deadline: float = float("inf")
    then: dict[int, Place] = field(default_factory=dict)
    pulse: Pulse = field(default_factory=Pulse)
    sights: dict[int, Sight] = field(default_factory=dict)
    looked: float = field(default_factory=time.monotonic)
    still_s: float = 0.0
    tell: Callable[[str], None] = lambda line: None
    told_of_work: bool = False

    def run(self) -> None:
        """Wait until every expected rank has ended.

        Raises:
            KeyboardInterrupt: a signal asked to end them at once.
            Preempted: a signal came before the first step, and they do not hear it.
        """
        while not self.ended.keys() >= set(self.expected):
            self._heed()
            self._look()
            for child in self._running():
                self._look_at(child)
            for node, link in self.others.links.items():
                self._listen_to(node, link)
            time.sleep(POLL_S)

    @property
    def _leads(self) -> bool:
        return 0 not in self.others.links

    def _heed(self) -> None:
        """Do what signals ask for.

        Raises:
            KeyboardInterrupt: as `run`.
            Preempted: likewise.
        """
        if self.asked.at_once:
            raise KeyboardInterrupt
        if self.asked.at is not None and not self._leads and not self.told:
            self.others.tell({"asked": True})
            self.told = True
        since = self.asked.at or self.asked_elsewhere
        if since is None or not self._leads or time.monotonic() < since + UNBEGUN_S:
            return
        places = [child.board.read() for child in self._running()]
        if places and all((place.step, place.phase) == (0, "start") for place in places):
            raise Preempted(self.unbegun)

    def _look(self) -> None:
        """Look now and then whether the run stands still; the first machine decides."""
        elapsed = time.monotonic() - self.looked
        interval = min(LOOK_S, max(POLL_S, self.timeout_s / LOOKS))
        limit_s = self.timeout_s + FIRST_S
        is_due = elapsed >= interval or self.still_s + elapsed > limit_s
        if not is_due or not self._running() or self.then:
            return
        self.looked += elapsed
        sight = self.pulse.look(self._running())
        if not self._leads:
            self.others.tell({"sight": asdict(sight)})
            return
        self.sights[0] = sight
        sights = self.sights.values()
        moves = any(each.moves for each in sights)
        # While this process was stopped itself, ranks may have been as well.
        self.still_s = 0.0 if moves else self.still_s + min(elapsed, 2 * interval)
        is_held = any(each.held_s > self.timeout_s + interval for each in sights)
        if self.still_s > limit_s or (is_held and any(each.is_apart for each in sights)):
            self.others.tell({"still": True})
            self._give_up()
        elif moves:
            self._tell_of_work()

    def _tell_of_work(self) -> None:
        """Say once that ranks have long waited for what another one does."""
        works = [each.works for each in self.sights.values() if each.works]
        waited_s = max(each.waited_s for each in self.sights.values())
        is_long = waited_s > max(self.timeout_s, WORK_S)
        if works and is_long and not self.told_of_work:
            self.told_of_work = True
            self.tell(f"waiting for {works[0]}")

    def _give_up(self) -> None:
        """End ranks that nothing is to be expected of."""
        self._ask_where()
        self.deadline = min(self.deadline, time.monotonic() + STACKS_S)

    def _ask_where(self) -> None:
        places = {child: child.board.read() for child in self._running()}
        self.then = {c.rank: replace(at, waits=waits(c, at)) for c, at in places.items()}
        ask_for_stacks(self._running(), self.private)

    def _running(self) -> list[Child]:
        return [child for child in self.children if child.rank not in self.ended]

    def _look_at(self, child: Child) -> None:
        overdue = time.monotonic() >= self.deadline
        code = child.process.poll()
        if code is None and not overdue:
            return
        if code is None:
            child.signal_group(signal.SIGKILL)
            code = child.process.wait()
        end = end_of(child, self.private, code, child.board.read(), stopped=overdue)
        if child.rank in self.then and (end.stopped or "lost" in end.told):
            end = replace(end, place=self.then[child.rank])
        self._note(end)

    def _listen_to(self, node: int, link: Link) -> None:
        for message in link.receive():
            if "rank" in message:
                end = Ended.from_json(message["rank"])
                if node in self.others.links and node:
                    self._note(end)
                else:
                    self._react(end)
            else:
                self._hear(node, message)
        if not link.is_open:
            self._miss(node)

    def _hear(self, node: int, message: dict[str, Any]) -> None:
        if "sight" in message:
            self.sights[node] = Sight(**message["sight"])
        if "asked" in message:
            self.asked_elsewhere = time.monotonic()
        if "still" in message:
            self._give_up()
        if "ended" in message:
            self.over, self.deadline = message, 0.0

    def _miss(self, node: int) -> None:
        """Take the ranks of a machine that is gone for lost."""
        if node == 0:
            self.deadline = 0.0
            return
        gone = [rank for rank in self.ranks_of(node) if rank not in self.ended]
        if not gone:
            return
        text = (
            f"node {node} with {_named(gone)} was lost: its command ended, or its machine cannot "
            "be reached"
        )
        for rank in gone:
            now = time.monotonic()
            self._note(Ended(rank=rank, code=1, told={"gone": text}, at=now, place=Place()))

    def _note(self, end: Ended) -> None:
        """Remember an end, and let the other machines know."""
        self.ended[end.rank] = end
        self.others.tell({"rank": end.to_json()})
        self._react(end)

    def _react(self, end: Ended) -> None:
        """Give the others their time to follow."""
        is_bad = end.failed and end.code != Preempted.exit_code
        if is_bad and not self.then:
            self._ask_where()
        patience_s = self.timeout_s
        if is_bad:
            patience_s = ORDERLY_S if "error" in end.told else GRACE_S
        self.deadline = min(self.deadline, time.monotonic() + patience_s)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
