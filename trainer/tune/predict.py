"""Predict the peak of a step: by a fake run, or from a measured probe where none is possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import final

import numpy as np

from trainer.accumulate.rollback import Snapshot
from trainer.models.duplicate import duplicate
from trainer.parallel.sync import Deferred
from trainer.plan.memory import Shape
from trainer.tune.fake import CannotRunFake, fake_copy, fake_micro_batch, predict_peak
from trainer.tune.speed import fit_shapes, terms
from trainer.tune.tensors import MemoryEstimate, PeakBytes
from trainer.tune.workload import Workload, forward_bytes, fullest_steps, gradients

COMPARED_TOKENS = 32  # longest sample of the micro-batch that is run both ways
CLOSE = 0.05  # how far a fake forward's bytes may be from the real one's
# Longest sample of a probe; long enough for activations to outweigh temporaries of weights
PROBE_TOKENS = 128

Predict = Callable[[Shape], MemoryEstimate]
"""Gives the peak of a step by the shape of its largest micro-batch."""


@final
class Predictor:
    """Predicts the peak of a step by the shape of its largest micro-batch.

    Models that need values are probed for real, and so are those with a kernel that takes memory
    its fake knows nothing of, as recurrent layers have on a CPU.

    The model is left bit for bit as it was; `smallest` is a shape that the run has, of few samples
    and the greatest length.
    """

    def __init__(self, work: Workload, smallest: Shape, *, recompute: bool = False) -> None:
        self._work, self._smallest, self._recompute = work, smallest, recompute
        self._is_checked = False
        self._probe: Predict | None = None
        self.method = "memory predicted with fake tensors"

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """Predict; once a shape cannot run fake, that and all later ones are probed."""
        work, smallest, recompute = self._work, self._smallest, self._recompute
        if self._probe is None:
            try:
                if not self._is_checked:
                    _compare(work, smallest, recompute=recompute)
                    self._is_checked = True
                return predict_peak(work, shape, recompute=recompute)
            except CannotRunFake as answer:
                self.method = f"memory by real probes of small shapes ({answer})"
                self._probe = probe_peak(work, smallest, recompute=recompute)
        return self._probe(shape)


def _compare(work: Workload, smallest: Shape, *, recompute: bool) -> None:
    """Run the forward of a small micro-batch for real, and compare its bytes with its fake's.

    Raises:
        CannotRunFake: they are not close, or the model needs values.
    """
    if any(p.is_meta for p in work.model.parameters()):
        return
    # BatchNorm of single values needs two samples.
    shape, real = Shape(min(2, smallest.num_samples), min(smallest.length, COMPARED_TOKENS)), 0
    # What fails here fails again, in full, in the step.
    with suppress(Exception), work.live(recompute=recompute):
        real = forward_bytes(work, work.fields(*shape))
    if not real:
        return
    with fake_micro_batch(work, shape, recompute=recompute) as (theirs, fields, _):
        fake = forward_bytes(theirs, fields)
    if abs(real - fake) > CLOSE * real:
        raise CannotRunFake(f"a fake forward holds {fake / real:.0%} of what a real one does")


def probe_peak(work: Workload, smallest: Shape, *, recompute: bool = False) -> Predict:
    """Fit the activations of real forward and backward passes on small shapes.

    Three terms: constant, per position, and per pair of positions of one sample, where attention
    scores are materialised. Arguments as for `Predictor`.
    """
    length = min(smallest.length, PROBE_TOKENS)
    lengths = dict.fromkeys((length, max(1, length // 2)))
    with work.live(recompute=recompute):
        count = min(2, smallest.num_samples)  # BatchNorm of single values needs two
        shapes = [Shape(n * count, length) for length in lengths for n in (1, 2, 4)]
        measured = {shape: _activations(work, shape) for shape in shapes}
    resting, coefficients = _resting(work), fit_shapes(measured)

    def predict(shape: Shape) -> MemoryEstimate:
        grown = max(0, int(np.dot(coefficients, terms(shape))) - resting.activations)
        return resting.plus(grown)

    return predict


def _activations(work: Workload, shape: Shape) -> float:
    """Measure one micro-batch while gradients are there."""
    peak, fields, snapshot = PeakBytes(), work.fields(*shape), Snapshot(work.model)
    with peak:
        work.count(peak, fields)
        for _ in range(2):
            peak.reset()
            snapshot.take()
            work.backward(fields)
            peak.assign("gradients", gradients(work.model))
    return float(peak.estimate.activations)


def _resting(work: Workload) -> MemoryEstimate:
    """Count what any shape needs; the optimizer runs fake even where the model does not."""
    peak = PeakBytes()
    try:
        with fake_copy(work) as (_, theirs, lay_out):
            model = lay_out(theirs.model)
            # Without a window a rank in shards has no more than in one.
            with peak:
                fullest_steps(replace(theirs, sync=Deferred()), model, peak)
    except CannotRunFake:
        # An optimizer that needs values, too, runs on a copy of the model.
        peak = PeakBytes()
        with work.filled():
            model = work.alone(duplicate(work.model))
            with peak:
                fullest_steps(replace(work, fake_ranks=None), model, peak)
    return peak.estimate
