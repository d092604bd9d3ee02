"""A network for runs over several ranks, and what befalls a rank at a stated step and phase.

A strike is written `KIND@PHASE:STEP@RANK`, such as `SIGKILL@update:3@1`; it happens once. Its time
goes into a file, so that a restarted rank knows that it is over, and a test when it was. Strikes
come through the environment, since a run that is struck has the same config as one that is not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.reliability import toys
from trainer.core.rank_progress import Phase
from trainer.core.world import World


@dataclass(frozen=True)
class Strike:
    """What happens, and where."""

    kind: str
    phase: Phase
    step: int
    rank: int
    text: str

    @classmethod
    def of(cls, text: str) -> Strike:
        kind, place, rank = text.split("@")
        phase, _, step = place.partition(":")
        return cls(kind, phase, int(step), int(rank), text)  # type: ignore[arg-type] # typed

    def is_at(self, world_rank: int, phase: str, step: int) -> bool:
        return (self.rank, self.phase, self.step) == (world_rank, phase, step)

    def happen(self, marks: Path) -> None:
        """Happen, unless it did."""
        mark = marks / self.text
        if mark.exists():
            return
        mark.write_text(repr(time.time()))
        if self.kind == "exception":
            raise ArithmeticError("injected")
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "sleep":
            time.sleep(1000)
        if self.kind == "skip":
            _skip_the_next_sum()
            return
        os.kill(os.getpid(), getattr(signal, self.kind))
        time.sleep(0.5 if self.kind == "SIGTERM" else 0)


def _skip_the_next_sum() -> None:
    add = World.sum

    def skip(world: World, values: Tensor) -> Tensor:
        World.sum = add  # type: ignore[method-assign]
        return values

    World.sum = skip  # type: ignore[method-assign]


def _arm(strikes: Sequence[Strike], marks: Path) -> None:
    note = World.note

    def noted(world: World, phase: Phase, *, step: int | None = None) -> None:
        note(world, phase, step=step)
        at = world.board.read().step
        for strike in strikes:
            if strike.is_at(world.rank, phase, at):
                strike.happen(marks)

    World.note = noted  # type: ignore[method-assign]


class Net(nn.Module):
    """Embedding, two residual blocks with dropout, head.

    Args:
        pause: seconds that each training forward takes.
    """

    def __init__(
        self,
        pause: float = 0.0,
        width: int = 8,
        dropout: float = 0.0,
        double: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, toys.VOCABULARY)
        self.pause = pause
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        if double:
            self.double()
        known = [Strike.of(text) for text in os.environ.get("STRIKES", "").split()]
        marks = Path(os.environ.get("MARKS", "marks"))
        rank = int(os.environ.get("RANK", "0"))
        for strike in known:
            if strike.is_at(rank, "start", 0):
                strike.happen(marks)
        if known:
            _arm(known, marks)

    def forward(self, input_ids: Tensor, fault: Tensor | None = None) -> Tensor:
        x: Any = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(self.dropout(x))
        if self.training:
            time.sleep(self.pause)
            self.calls += 1
            if fault is not None:
                logits = toys.struck(logits, fault)
        return logits
