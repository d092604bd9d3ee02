"""Compare our run with other trainers on a GPU, all taking turns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, final

import torch
from gpu_peers import HAND, Peer, Sample, Turn, make_peers
from gpu_run import (
    RAGGED,
    WINDOWS,
    Bench,
    Documents,
    Fields,
    Stop,
    reason_of,
    start_afresh,
    synchronize,
    utilization,
)

OURS = "ours, accum=auto"


@final
@dataclass
class Comparison:
    """Trainers that take turns: inside the hook of our run, every other one takes as many steps.

    All are compiled. The first turn of each warms up.

    Attributes:
        turns: of every trainer, the first one included.
        failed: why a trainer has none.
    """

    bench: Bench
    kind: str
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    plan: Fields = field(default_factory=dict)  # of our run

    def table(self) -> list[tuple[str, Fields]]:
        """Measure; gives a row for each trainer."""
        self.samples = self._samples()
        more = ("compile=true", f"batch.global={self.bench.scale.global_batch}")
        try:
            start_afresh()
            self.plan = self.bench.run(self.bench.lines(self.kind, *more), Ours(self))
        except Exception as error:
            # The others are measured all the same.
            self.failed[OURS] = reason_of(error)
            self._make_peers()
            for _ in range(self.bench.scale.turns + 1):
                self.let_peers()
        hand = self._rate(HAND)
        return [
            *((name, self._fields(name, hand)) for name in self.turns),
            *((name, {"failed": why}) for name, why in self.failed.items()),
        ]

    def let_peers(self) -> None:
        """Let every other trainer take its turn."""
        if not self.turns.keys() - {OURS} and not self.failed.keys() - {OURS}:
            self._make_peers()
        steps, size = self.bench.scale.steps, self.bench.scale.global_batch * self.bench.scale.steps
        taken = [self.samples[i % len(self.samples)] for i in range(size)]
        self.samples = self.samples[size % len(self.samples) :] + taken[: size % len(self.samples)]
        for name, peer in list(self.peers.items()):
            try:
                self.turns.setdefault(name, []).append(peer(taken, steps))
            except Exception as error:
                self.failed[name] = reason_of(error)
                del self.peers[name], self.turns[name]

    def _make_peers(self) -> None:
        # Made once our run has found its cap, in memory that was as free as a user's.
        try:
            self.peers, missing = make_peers(self.bench.scale)
        except Exception as error:
            self.failed[HAND] = reason_of(error)
            return
        kept = {HAND, "hf padded"} if self.kind == WINDOWS else {*self.peers}
        kept &= {*self.bench.peers} or kept
        self.peers = {name: peer for name, peer in self.peers.items() if name in kept}
        self.failed |= {name: why for name, why in missing.items() if self.kind == RAGGED}

    def _samples(self) -> list[Sample]:
        data = Documents(str(self.bench.folder))
        if self.kind == RAGGED:
            return [data[i] for i in range(len(data))]
        length = self.bench.scale.length
        tokens = torch.from_numpy(data.tokens[:].astype("int64"))
        rows = tokens[: len(tokens) // length * length].view(-1, length)
        return [{"input_ids": row, "labels": row} for row in rows]

    def _rates(self, name: str) -> list[float]:
        timed = self.turns.get(name, [])[1:]
        return [turn.tokens / turn.seconds for turn in timed]

    def _rate(self, name: str) -> float:
        return median(self._rates(name) or [0.0])

    def _fields(self, name: str, hand: float) -> Fields:
        rates, rate, turns = self._rates(name), self._rate(name), self.turns[name][1:]
        computed = sum(turn.positions for turn in turns)
        seen = self.bench.tokens_seen(self.kind)
        return {
            "tokens_per_s": rate,
            "turns": " ".join(f"{each:.0f}" for each in rates),
            "cap": self.plan.get("max_tokens") if name == OURS else None,
            "mfu": utilization(rate, self.bench.scale, seen),
            "over_hand": rate / hand if hand else None,
            "padding": 1 - sum(t.tokens for t in turns) / computed if computed else None,
        }


@final
@dataclass
class Ours:
    """Sees the steps of our run, and lets the others take their turns between them.

    Attributes:
        began: when this turn of ours did, by `time.perf_counter`.
        before: tokens consumed by then.
        seen: tokens consumed by the last step.
        positions: computed in this turn.
    """

    comparison: Comparison
    began: float = 0.0
    before: int = 0
    seen: int = 0
    positions: float = 0.0

    def step(self, entry: Mapping[str, Any]) -> None:
        """See a step."""
        comparison, tokens = self.comparison, entry["tokens"]
        scale, turns = comparison.bench.scale, comparison.turns.setdefault(OURS, [])
        if comparison.bench.left_s < 0:
            raise Stop
        self.positions += (tokens - self.seen) / (1 - entry["padding"])
        self.seen = tokens
        if entry["step"] % scale.steps:
            return
        synchronize()
        seconds = time.perf_counter() - self.began
        turns.append(Turn(tokens - self.before, round(self.positions), seconds))
        comparison.let_peers()
        if len(turns) > scale.turns:
            raise Stop
        synchronize()
        self.began, self.before, self.positions = time.perf_counter(), tokens, 0.0
