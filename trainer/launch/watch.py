"""Waits for every rank of a run, and ends those that do not follow when one ended badly."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from trainer.board import Place
from trainer.launch.children import Child, Ended, ask_for_stacks, end_of
from trainer.launch.nodes import Link, Nodes

POLL_S = 0.05

GRACE_S = 1.0
"""How long the others have to notice that a rank is lost, and to say so, before they are killed."""

ORDERLY_S = 6.0
"""How long they have where one ended with a reason of its own, which they may share."""


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
        ended: those that ended.
        over: what the first machine said, to another, of the end of the run.
        deadline: when what still runs is killed, by the monotonic clock.
        then: where the others were when the first one ended badly.
    """

    children: Sequence[Child]
    private: Path
    others: Nodes
    expected: range
    ranks_of: Callable[[int], range]
    timeout_s: float
    ended: dict[int, Ended] = field(default_factory=dict)
    over: dict[str, Any] | None = None
    deadline: float = float("inf")
    then: dict[int, Place] = field(default_factory=dict)

    def run(self) -> None:
        """Wait until every expected rank has ended."""
        while not self.ended.keys() >= set(self.expected):
            for child in self._running():
                self._look_at(child)
            for node, link in self.others.links.items():
                self._listen_to(node, link)
            time.sleep(POLL_S)

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
            if "ended" in message:
                self.over, self.deadline = message, 0.0
        if not link.is_open:
            self._miss(node)

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
        if end.code not in (0, 75) and not self.then:
            self.then = {child.rank: child.board.read() for child in self._running()}
            ask_for_stacks(self._running(), self.private)
        patience_s = self.timeout_s
        if end.code not in (0, 75):
            patience_s = ORDERLY_S if "error" in end.told else GRACE_S
        self.deadline = min(self.deadline, time.monotonic() + patience_s)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
