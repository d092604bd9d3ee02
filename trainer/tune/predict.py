"""Predict the peak of a step: by a fake run, or from a measured probe where none is possible."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from trainer.accumulate.rollback import Snapshot
from trainer.core.errors import ConfigError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.world import World
from trainer.models.duplicate import duplicate
from trainer.parallel.base import Replicated
from trainer.parallel.sync import Deferred
from trainer.plan.cut import FloatArray
from trainer.plan.memory import Shape
from trainer.tune.fake import CannotRunFake, fake_copy, fake_micro_batch, predict_peak
from trainer.tune.fit import fit_shapes, terms
from trainer.tune.restored import restoring
from trainer.tune.tensors import MemoryEstimate, PeakBytes
from trainer.tune.workload import Workload, forward_bytes, fullest_steps, gradients

BY_FAKE_RUNS = "memory by fake runs"

COMPARED_TOKENS = 32
"""Longest sample of the micro-batch that is run both ways."""

CLOSE = 0.05
"""How far a fake forward's bytes may be from the real one's."""

PROBE_TOKENS = 128
"""Longest sample of a probe; long enough for activations to outweigh temporaries of weights."""


@final
class Predictor:
    """Predicts the peak of a step by the shape of its largest micro-batch.

    Probes are for models that need values, and for those with a kernel that takes memory its fake
    knows nothing of, as recurrent layers have on a CPU.

    Args:
        work: what to compute; its model is left bit for bit as it was.
        smallest: a shape that the run has, of few samples and the greatest length.
        recompute: under activation checkpointing.

    Raises:
        ConfigError: the model computes more samples, and not as few as these.
    """

    def __init__(self, work: Workload, smallest: Shape, *, recompute: bool = False) -> None:
        self._work = work
        self._recompute = recompute
        self._known: dict[Shape, MemoryEstimate] = {}
        self._probe: Probe | None = None
        self.method = BY_FAKE_RUNS
        try:
            self._known[smallest] = predict_peak(work, smallest, recompute=recompute)
            reason = _difference(work, smallest, recompute=recompute)
        except CannotRunFake as answer:
            reason = f"cannot run fake: {answer.reason}"
        if reason is not None:
            self._known.clear()
            self._fall_back(smallest, reason)

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """Predict; once a shape cannot run fake, that and all later ones are probed."""
        if shape not in self._known:
            self._known[shape] = self._predict(shape)
        return self._known[shape]

    def _predict(self, shape: Shape) -> MemoryEstimate:
        if self._probe is None:
            try:
                return predict_peak(self._work, shape, recompute=self._recompute)
            except CannotRunFake as answer:
                self._fall_back(shape, f"cannot run fake: {answer.reason}")
        assert self._probe is not None
        return self._probe(shape)

    def _fall_back(self, smallest: Shape, reason: str) -> None:
        self.method = f"memory by real probes of small shapes ({reason})"
        self._probe = probe_peak(self._work, smallest, recompute=self._recompute)


def _difference(work: Workload, smallest: Shape, *, recompute: bool) -> str | None:
    """Run the forward of a small micro-batch for real, and compare its bytes with its fake's.

    Returns:
        How they differ; None where they do not, or where nothing could be run.

    Raises:
        CannotRunFake: the model needs values, not only shapes.
    """
    if any(p.is_meta for p in work.model.parameters()):
        return None
    length = min(smallest.length, COMPARED_TOKENS)
    for count in sorted({1, min(2, smallest.num_samples), smallest.num_samples}):
        shape = Shape(count, length)
        # What fails here fails again, in full, in the step; BatchNorm needs more than one value.
        with (
            suppress(Exception),
            restoring(work.model, work.objective),
            work.variant(recompute=recompute),
        ):
            real = forward_bytes(work, work.fields(*shape))
            break
    else:
        return None
    with fake_micro_batch(work, shape, recompute=recompute) as (theirs, fields, _):
        fake = forward_bytes(theirs, fields)
    if abs(real - fake) <= CLOSE * real:
        return None
    return f"a fake forward holds {fake / real:.0%} of what a real one does"


@final
@dataclass(frozen=True)
class Probe:
    """Extrapolates activations from real forward and backward passes of small shapes.

    Attributes:
        resting: what is there whatever the shape: weights, gradients, optimizer state; with the
            temporaries of the optimizer's step as activations.
        coefficients: bytes of activations per term of `fit.terms`.
    """

    resting: MemoryEstimate
    coefficients: FloatArray

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """Predict."""
        fitted = int(sum(c * t for c, t in zip(self.coefficients, terms(shape), strict=True)))
        activations = max(fitted, self.resting.activations)
        grown = activations - self.resting.activations
        return replace(
            self.resting, activations=activations, peak_bytes=self.resting.peak_bytes + grown
        )


def probe_peak(work: Workload, smallest: Shape, *, recompute: bool = False) -> Probe:
    """Fit the activations of real forward and backward passes on small shapes.

    Three terms: constant, per position, and per pair of positions of one sample, where attention
    scores are materialised. The model is left bit for bit as it was.

    Args:
        work: what to compute.
        smallest: a shape that the run has, of few samples and the greatest length.
        recompute: under activation checkpointing.

    Raises:
        ConfigError: the model computes more samples, and not as few as these.
    """
    length = min(smallest.length, PROBE_TOKENS)
    lengths = (length, max(1, length // 2))
    measured: dict[Shape, float] = {}
    with work.filled(), restoring(work.model, work.objective), work.variant(recompute=recompute):
        count = _least_count(work, smallest.num_samples, lengths[-1])
        for shape in (Shape(n * count, t) for t in dict.fromkeys(lengths) for n in (1, 2, 4)):
            measured[shape] = _activations(work, shape)
    return Probe(_resting(work), fit_shapes(measured))


def _least_count(work: Workload, most: int, length: int) -> int:
    """Find how few samples a model computes: BatchNorm of single values needs two.

    Raises:
        ConfigError: more than `most`.
    """
    for count in sorted({1, min(2, most)} - {most}):
        if _failure(work, Shape(count, length)) is None:
            return count
    failure = _failure(work, Shape(most, length))
    if failure is None:
        return most
    if _failure(work, Shape(2 * most, length)) is not None:
        raise failure
    cause = next(iter(str(failure).splitlines()), "")
    raise ConfigError(
        f"model: it computes {2 * most} samples together and not {most} "
        f"({type(failure).__name__}: {cause}), which a tuned micro-batch may hold: type "
        "accum=fixed accum.micro=N"
    ) from failure


def _failure(work: Workload, shape: Shape) -> Exception | None:
    """Tell how a model fails on a shape, if it does."""
    try:
        work.backward(work.fields(*shape))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error
    return None


def _activations(work: Workload, shape: Shape) -> float:
    """Measure one micro-batch while gradients are there."""
    peak, fields = PeakBytes(), work.fields(*shape)
    snapshot = Snapshot(work.model)
    with peak:
        peak.assign("parameters", work.model.parameters())
        peak.assign("buffers", work.model.buffers())
        peak.assign("activations", fields.values())
        for _ in range(2):
            peak.reset()
            snapshot.take()
            work.backward(fields)
            peak.assign("gradients", gradients(work.model))
    return float(peak.estimate.activations)


def _resting(work: Workload) -> MemoryEstimate:
    """Count what any shape needs; the optimizer runs fake even where the model does not.

    An optimizer that needs values, too, runs on a copy of the model.
    """
    peak = PeakBytes()
    try:
        with fake_copy(work) as (_, theirs, lay_out):
            model = lay_out(theirs.model)
            # Without a window a rank in shards has no more than in one.
            with peak:
                fullest_steps(replace(theirs, sync=Deferred()), model, peak)
    except CannotRunFake:
        peak = PeakBytes()
        with work.filled():
            copy = duplicate(work.model)
            trained = [p for p in copy.parameters() if p.requires_grad]
            with peak:
                fullest_steps(
                    replace(work, fake_ranks=None),
                    Replicated(copy, work.call, trained, World()),
                    peak,
                )
    return peak.estimate
