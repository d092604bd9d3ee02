"""Predictors of the peak of a step, from the best that the model allows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, final

import torch
from torch import nn

from trainer.accumulate.rollback import Snapshot
from trainer.core.errors import ConfigError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.models.duplicate import duplicate
from trainer.parallel.base import Parallel
from trainer.parallel.sync import Deferred
from trainer.plan.cut import FloatArray
from trainer.plan.memory import Shape
from trainer.tune.fake import (
    CannotRunFake,
    fake_copy,
    fake_forward_bytes,
    predict_peak,
)
from trainer.tune.fit import fit_shapes, terms
from trainer.tune.restored import untouched
from trainer.tune.tensors import MemoryEstimate, PeakBytes
from trainer.tune.workload import (
    Workload,
    forward_bytes,
    gradients,
    state_of,
    update_laid_out,
)


class Predictor(Protocol):
    """Predicts the peak of a step by the shape of its largest micro-batch."""

    @property
    def method(self) -> str:
        """How, for a person to read."""

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """Predict."""


@final
@dataclass(frozen=True)
class FakeRuns:
    """Runs each shape itself on fake tensors.

    Attributes:
        work: what to compute.
        recompute: under activation checkpointing.
        known: what was run already.
    """

    work: Workload
    recompute: bool
    known: dict[Shape, MemoryEstimate] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """See `Predictor`."""
        return "memory by fake runs"

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """See `Predictor`; a shape that cannot run fake, where others can, is probed."""
        if shape not in self.known:
            self.known[shape] = self._run(shape)
        return self.known[shape]

    def _run(self, shape: Shape) -> MemoryEstimate:
        try:
            return predict_peak(self.work, shape, recompute=self.recompute)
        except CannotRunFake as answer:
            reason = f"cannot run fake: {answer.reason}"
        probes = probe_peak(self.work, shape, reason=reason, recompute=self.recompute)
        return probes(shape)


@final
@dataclass(frozen=True)
class Probes:
    """Extrapolates activations from real probes of small shapes.

    Attributes:
        resting: what is there whatever the shape: weights, gradients, optimizer state; with the
            temporaries of the optimizer's step as activations.
        coefficients: bytes of activations per term of `fit.terms`.
        reason: why it is not run on fake tensors.
    """

    resting: MemoryEstimate
    coefficients: FloatArray
    reason: str

    @property
    def method(self) -> str:
        """See `Predictor`."""
        return f"memory by real probes of small shapes ({self.reason})"

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """See `Predictor`."""
        fitted = int(sum(c * t for c, t in zip(self.coefficients, terms(shape), strict=True)))
        activations = max(fitted, self.resting.activations)
        grown = activations - self.resting.activations
        return replace(
            self.resting, activations=activations, peak_bytes=self.resting.peak_bytes + grown
        )


def predictor_for(work: Workload, smallest: Shape, *, recompute: bool = False) -> Predictor:
    """Choose how to predict: by fake runs, or by real probes.

    Probes are for models that need values, and for those with a kernel that takes memory its fake
    knows nothing of, as recurrent layers have on a CPU.

    Args:
        work: what to compute; its model is left bit for bit as it was.
        smallest: a shape that the run has, of few samples and the greatest length.
        recompute: under activation checkpointing.

    Raises:
        ConfigError: the model computes more samples, and not as few as these.
    """
    try:
        least = predict_peak(work, smallest, recompute=recompute)
        reason = _unlike(work, smallest, recompute=recompute)
    except CannotRunFake as answer:
        reason = f"cannot run fake: {answer.reason}"
    if reason is not None:
        return probe_peak(work, smallest, reason=reason, recompute=recompute)
    return FakeRuns(work, recompute, {smallest: least})


COMPARED_TOKENS = 32
"""Longest sample of the micro-batch that is run both ways."""

LIKE = 0.05
"""How far a fake forward's bytes may be from the real one's."""


def _unlike(work: Workload, smallest: Shape, *, recompute: bool) -> str | None:
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
            untouched(work.model, work.objective),
            work.variant(recompute=recompute),
        ):
            real = forward_bytes(work, work.fields(*shape))
            break
    else:
        return None
    fake = fake_forward_bytes(work, shape, recompute=recompute)
    if abs(real - fake) <= LIKE * real:
        return None
    return f"a fake forward holds {fake / real:.0%} of what a real one does"


PROBE_TOKENS = 128
"""Longest sample of a probe; long enough for activations to outweigh temporaries of weights."""


def probe_peak(work: Workload, smallest: Shape, *, reason: str, recompute: bool = False) -> Probes:
    """Fit the activations of real forward and backward passes on small shapes.

    Three terms: constant, per position, and per pair of positions of one sample, where attention
    scores are materialised. The model is left bit for bit as it was.

    Args:
        work: what to compute.
        smallest: a shape that the run has, of few samples and the greatest length.
        reason: why it is not run on fake tensors.
        recompute: under activation checkpointing.

    Raises:
        ConfigError: the model computes more samples, and not as few as these.
    """
    length = min(smallest.length, PROBE_TOKENS)
    lengths = (length, max(1, length // 2))
    measured: dict[Shape, float] = {}
    with work.filled(), untouched(work.model, work.objective), work.variant(recompute=recompute):
        count = _least_count(work, smallest.num_samples, lengths[-1])
        for shape in (Shape(n * count, t) for t in dict.fromkeys(lengths) for n in (1, 2, 4)):
            measured[shape] = _activations(work, shape)
    return Probes(_resting(work), fit_shapes(measured), reason)


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
            if lay_out is None:
                _update(theirs, theirs.model, peak)
            else:
                _update_laid_out(theirs, lay_out(theirs.model), peak)
    except CannotRunFake:
        peak = PeakBytes()
        with work.filled():
            _update(work, duplicate(work.model), peak)
    return peak.estimate


def _update_laid_out(work: Workload, model: Parallel, peak: PeakBytes) -> None:
    """Update a model in shards within a window, in which a rank holds more than without one."""
    module, sync = model.module, Deferred()
    with peak:
        peak.assign("parameters", module.parameters())
        peak.assign("buffers", module.buffers())
        optimizer = work.make_optimizer(module)
        for _ in range(2):
            peak.reset()
            sync.gather(model)
            peak.assign("parameters", module.parameters())
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            peak.assign("gradients", gradients(module))
            update_laid_out(sync, model, optimizer, peak)


def _update(work: Workload, model: nn.Module, peak: PeakBytes) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    with peak:
        peak.assign("parameters", model.parameters())
        peak.assign("buffers", model.buffers())
        optimizer = work.make_optimizer(model)
        for _ in range(2):
            peak.reset()
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            peak.assign("gradients", gradients(model))
            optimizer.step()
            peak.assign("optimizer_state", state_of(optimizer))
