"""Find what fits by what is known of a model's memory, predicting the rest while time allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from trainer.core import signals
from trainer.plan.cut import Cost
from trainer.plan.memory import Shape, candidate_caps, corner_shapes, largest_cap
from trainer.tune.cache import Facts
from trainer.tune.predict import Predictor
from trainer.tune.speed import Stopwatch, positions
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuning import Candidate, Question

NEAR_BEST = 0.03  # steps that differ by less count as equally fast
# Caps below the longest sample are asked about down to this: no device is faster below
LEAST_CAP = 512


@final
@dataclass
class Variant:
    """What is found out with, or without, activation checkpointing, as far as time allows."""

    question: Question
    facts: Facts  # known already; gets what is found
    watch: Stopwatch
    recompute: bool = field(kw_only=True)
    predictor: Predictor | None = None  # made when the facts lack a shape
    caps_run: dict[int, int] = field(default_factory=dict)  # predicted bytes
    quickest: float | None = None  # seconds of a prediction; the first sets things up, too
    rows: list[Candidate] = field(default_factory=list)  # caps that fit, ascending
    times: dict[int, float] = field(default_factory=dict)  # of a step, by cap; in tokens if untimed
    cost: Cost = field(default_factory=Cost)
    how: str = "time unknown"  # where times and cost are from
    margin: float = NEAR_BEST  # infinite where no choice can be made by time

    @property
    def single(self) -> Shape:
        """The least that any step needs: one sample, or one group, of the greatest length."""
        question = self.question
        size = min(question.layout.group_size, question.most_samples)
        return Shape(size, question.padded(question.longest))

    @property
    def smallest_cap(self) -> int:
        """The least cap worth asking about: what is longer than it is alone."""
        cap, question = positions(self.single), self.question
        while cap % 2 == 0 and cap // 2 >= max(question.typical, LEAST_CAP):
            cap //= 2
        return cap

    @property
    def limit_bytes(self) -> int:
        """What tensors may take, as far as is known."""
        return self.question.limit.for_tensors(self.ratio, self.question.work.resident_bytes)

    @property
    def ratio(self) -> float:
        """Resident bytes per byte of tensors, as far as is known.

        What this machine's allocator costs on top says nothing about another machine.
        """
        return self.facts.ratio if self.question.timed else 1.0

    def peak(self, shape: Shape, *, is_needed: bool = False) -> MemoryEstimate:
        """Predict the peak of a step whose largest micro-batch has this shape.

        Where there is no time left, and the shape is neither needed nor the single one, bound it by
        what that takes: `n` times the positions take at most `n` times the activations.
        """
        peaks, watch, single = self.facts.peaks, self.watch, self.single
        if shape in peaks:
            return peaks[shape]
        signals.check()
        if not (is_needed or shape == single or watch.has_room_for(self.quickest or 0.0)):
            one = self.peak(single)
            grown = math.ceil(one.activations * max(0.0, positions(shape) / positions(single) - 1))
            return one.plus(grown)
        started = watch.clock()
        if self.predictor is None:
            self.predictor = Predictor(self.question.work, single, recompute=self.recompute)
        peaks[shape] = self.predictor(shape)
        self.facts.method = self.predictor.method
        took = watch.clock() - started
        self.quickest = took if self.quickest is None else min(took, self.quickest)
        return peaks[shape]

    def peak_under(self, cap: int) -> MemoryEstimate:
        """Predict the peak of a step under a cap: that of its worst corner."""
        q = self.question
        shapes = corner_shapes(cap, q.padded(q.longest), q.padded(q.shortest), q.most_samples)
        return max((self.peak(shape) for shape in shapes), key=lambda peak: peak.peak_bytes)

    def bytes_under(self, cap: int) -> int:
        """Predict the peak under a cap, between caps that were run where it was not itself.

        Peaks are affine in the cap as long as the same corner is the worst.
        """
        caps = sorted(self.caps_run)
        return int(np.interp(cap, caps, [self.caps_run[c] for c in caps]))

    def largest_fit(self) -> int | None:
        """Find the largest cap that fits; None when not even one sample does."""

        def search(caps: Sequence[int]) -> int | None:
            return largest_cap(predict, self.limit_bytes, caps)

        def predict(cap: int) -> int:
            self.caps_run[cap] = self.peak_under(cap).peak_bytes
            return self.caps_run[cap]

        single = self.peak(self.single).peak_bytes
        found = search(candidate_caps(self.smallest_cap, self.question.top))
        if found is None and single <= self.limit_bytes:
            # Many short samples may take more than the longest one, which is alone then.
            least = self.question.padded(self.question.shortest)
            found = search(candidate_caps(least, self.smallest_cap))
        return found
