"""A network for runs over several ranks, and what befalls a rank at a stated step and phase.

A strike is written `KIND@PHASE:STEP@RANK`, such as `SIGKILL@update:3@1`; it happens once. Its time
goes into a file, so that a restarted rank knows that it is over, and a test when it was. Strikes
come through the environment, since a run that is struck has the same config as one that is not.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.reliability import toys
from trainer.core.rank_progress import Phase
from trainer.core.world import World


def happen(strike: str, marks: Path) -> None:
    """Let a strike happen, unless it did."""
    mark, kind = marks / strike, strike.partition("@")[0]
    if mark.exists():
        return
    mark.write_text(repr(time.time()))
    if kind == "exception":
        raise ArithmeticError("injected")
    if kind == "exit":
        os._exit(3)
    if kind == "sleep":
        time.sleep(1000)
    if kind == "skip":
        _skip_the_next_sum()
        return
    os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(1)  # whoever was stopped is woken for its stack, which another thread may write


def _skip_the_next_sum() -> None:
    add = dist.all_reduce

    def skip(*_: object, **__: object) -> SimpleNamespace:
        dist.all_reduce = add
        return SimpleNamespace(wait=lambda: None)

    dist.all_reduce = skip


def _arm(strikes: Mapping[str, str], marks: Path) -> None:
    """Wait for the places of some strikes, `PHASE:STEP@RANK`."""
    note = World.note

    def noted(world: World, phase: Phase, *, step: int | None = None) -> None:
        note(world, phase, step=step)
        place = f"{phase}:{world.rank_progress.read().step}@{world.rank}"
        if place in strikes:
            happen(strikes[place], marks)

    World.note = noted  # type: ignore[method-assign]


class Net(toys.Net):
    """Two residual blocks more, which ranks can shard; `pause` is in seconds, for each forward."""

    def __init__(self, pause: float = 0.0, double: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        width = self.embed.embedding_dim
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        for name in ("norm", "head"):  # behind the blocks, where layer decay looks for them
            self.add_module(name, self._modules.pop(name))
        self.pause = pause
        if double:
            self.double()
        marks, rank = Path("marks"), os.environ.get("RANK", "0")
        strikes = {s.partition("@")[2]: s for s in os.environ.get("STRIKES", "").split()}
        if f"start:0@{rank}" in strikes:
            happen(strikes[f"start:0@{rank}"], marks)
        if strikes:
            _arm(strikes, marks)

    def inner(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return super().inner(hidden)

    def forward(self, input_ids: Tensor, fault: Tensor | None = None) -> Tensor:
        if self.training:
            time.sleep(self.pause)
        return super().forward(input_ids, fault)
