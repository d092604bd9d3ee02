"""Find what fits by what is known of a model's memory, predicting the rest while time allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from trainer.core import signals
from trainer.plan.memory import Shape, candidate_caps, corner_shapes, largest_cap
from trainer.tune.cache import Facts
from trainer.tune.predict import Predictor
from trainer.tune.speed import Stopwatch, positions
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuning import Question

LEAST_CAP = 512
"""Caps below the longest sample are asked about down to this: no device is faster below."""


@final
class TimeIsUpError(Exception):
    """A prediction would take tuning beyond its time."""


@final
@dataclass
class Variant:
    """Predicted peaks with, or without, activation checkpointing, as far as time allows.

    Attributes:
        facts: what is known; gets what is found.
        predictor: made when the facts lack a shape.
        caps_run: whose peaks were asked for, in bytes.
        quickest: seconds of a prediction; the first sets things up, too.
    """

    question: Question
    facts: Facts
    watch: Stopwatch
    recompute: bool = field(kw_only=True)
    predictor: Predictor | None = None
    caps_run: dict[int, int] = field(default_factory=dict)
    quickest: float | None = None

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

        Args:
            shape: of that micro-batch.
            is_needed: predict whatever time it takes.

        Raises:
            TimeIsUpError: it is not known, and there is no time to find out.
        """
        if shape not in self.facts.peaks:
            signals.check()
            if not is_needed and not self.watch.has_room_for(self.quickest or 0.0):
                raise TimeIsUpError
            started = self.watch.clock()
            if self.predictor is None:
                work = self.question.work
                self.predictor = Predictor(work, self.single, recompute=self.recompute)
            self.facts.peaks[shape] = self.predictor(shape)
            self.facts.method = self.predictor.method
            took = self.watch.clock() - started
            self.quickest = took if self.quickest is None else min(took, self.quickest)
        return self.facts.peaks[shape]

    def peak_under(self, cap: int) -> MemoryEstimate:
        """Predict the peak of a step under a cap: that of its worst corner."""
        q = self.question
        shapes = corner_shapes(cap, q.padded(q.longest), q.padded(q.shortest), q.most_samples)
        return max((self.peak(shape) for shape in shapes), key=lambda peak: peak.peak_bytes)

    def best_known_under(self, cap: int) -> MemoryEstimate:
        """Do the same; where there is no time, bound it by what one sample takes."""
        try:
            return self.peak_under(cap)
        except TimeIsUpError:
            return self._scaled(cap)

    def _scaled(self, cap: int) -> MemoryEstimate:
        """Bound the peak under a cap by the longest sample's: `n` of them take `n` times as much.

        Less than that, in truth, by what does not depend on the number of samples.
        """
        one = self.peak(self.single)
        grown = math.ceil(one.activations * max(0.0, cap / positions(self.single) - 1.0))
        return replace(one, activations=one.activations + grown, peak_bytes=one.peak_bytes + grown)

    def bytes_under(self, cap: int) -> int:
        """Predict the peak under a cap, between caps that were run where it was not itself.

        Peaks are affine in the cap as long as the same corner is the worst.
        """
        caps = sorted(self.caps_run)
        return int(np.interp(cap, caps, [self.caps_run[c] for c in caps]))

    def largest_fit(self) -> int | None:
        """Find the largest cap that fits; None when not even one sample does.

        Where time is up, the largest that does by what is known.
        """
        single = self.peak(self.single, is_needed=True).peak_bytes
        found = self._search(candidate_caps(self.smallest_cap, self.question.top))
        if found is None and single <= self.limit_bytes:
            # Many short samples may take more than the longest one, which is alone then.
            least = self.question.padded(self.question.shortest)
            found = self._search(candidate_caps(least, self.smallest_cap))
        return found

    def _search(self, caps: Sequence[int]) -> int | None:
        """Search the largest of these caps that fits, and note what was run on the way."""

        def predict(cap: int) -> int:
            self.caps_run[cap] = self.peak_under(cap).peak_bytes
            return self.caps_run[cap]

        try:
            return largest_cap(predict, self.limit_bytes, caps).cap
        except TimeIsUpError:
            peaks = {cap: self.caps_run.get(cap, self._scaled(cap).peak_bytes) for cap in caps}
            fits = [cap for cap, peak in peaks.items() if peak <= self.limit_bytes]
            if not fits:
                return None
            self.caps_run.update({cap: peaks[cap] for cap in (fits[0], fits[-1])})
            return fits[-1]

    def remember_ratio(self, ratio: float | None) -> None:
        """Remember what a byte of tensors costs, at the worst that was seen."""
        self.facts.ratio = max(ratio or 1.0, self.facts.ratio)
