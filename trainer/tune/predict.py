"""Predict the peak of a step: by a fake run, or from a measured probe where none is possible.

Fake tensors have shapes, types and storages of a size, and no data, so a step of any size runs in
a fraction of a second anywhere. Every allocation PyTorch would make is seen: where attention
scores are materialised, a line through two real probes is up to 51 % off and this is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.accumulate.rollback import Snapshot
from trainer.core.errors import TrainError
from trainer.core.out_of_memory import AllocationGuard
from trainer.models.compilation import COMPILED_SHAPES, compile_model
from trainer.models.duplicate import duplicate
from trainer.models.first_weights import is_on_meta
from trainer.objectives.linear_cross_entropy import only_peak
from trainer.parallel.sync import Deferred
from trainer.plan.memory import Shape
from trainer.tune.peak_bytes import MemoryEstimate, PeakBytes
from trainer.tune.speed import fit_shapes, terms
from trainer.tune.workload import LayOut, Workload, fullest_steps, gradients, restoring

# Longest sample of a probe, if samples are as short; long enough for activations to outweigh
# temporaries of weights
PROBE_TOKENS = 128
# Decomposes operators and chooses what is saved for backward as Inductor does, and fuses nothing
UNFUSED = "aot_eager_decomp_partition"
PREDICTED = "memory predicted from shapes alone"
"""How peaks are known, for a person to read."""

_log = logging.getLogger(__name__)

Predict = Callable[[Shape], MemoryEstimate]
"""Gives the peak of a step by the shape of its largest micro-batch."""


class CannotRunFake(Exception):  # noqa: N818 - an answer, not a fault: a real probe follows
    """The model needs more than shapes; says in one line what."""


@contextmanager
def fake_copy(work: Workload) -> Iterator[tuple[FakeTensorMode, Workload, LayOut]]:
    """Lend a workload around a copy of its model and objective whose every tensor is a fake.

    On a copy, nothing that a forward leaves behind, such as a cache, makes the model hold fakes.
    Yields the mode, entered, and what lays the copy out as one rank of the run has it.
    `CannotRunFake` where the model cannot be copied, or the block asks for a value.
    """
    mode = FakeTensorMode()
    module, device = work.model.module, work.model.device
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, object] = {id(tensor): _fake_of(tensor, mode, device) for tensor in tensors}
    ranks: AbstractContextManager[LayOut] = nullcontext(work.on_one_rank)
    if work.fake_ranks is not None:
        ranks = work.fake_ranks()
    log = logging.getLogger(FakeTensorMode.__module__)  # tells of every fault, which is an answer
    was_disabled, log.disabled = log.disabled, True
    try:
        with restoring(nn.Module()), ranks as lay_out:
            # Of tensors among the attributes of the model.
            def fake(tensor: Tensor) -> Tensor:
                if tensor.is_meta:
                    return _fake_of(tensor, mode, device)
                return _fake_of(tensor, mode, tensor.device)

            module, objective = duplicate((module, work.model.objective), memo, fake)
            for parameter in module.parameters():
                parameter.grad = None
            model = replace(work.model, module=module, objective=objective)
            with mode:
                yield mode, replace(work, model=model), lay_out
    except TrainError:
        raise  # what the model, or the objective, says to the user
    except Exception as error:
        # Fake runs stop with many types (data-dependent, unsupported, assertions, plain
        # RuntimeErrors). A fault of the model's own shows again in the real run that follows.
        _log.info("cannot run with fake tensors: %r", error)
        raise CannotRunFake("the model does not run on shapes alone") from error
    finally:
        log.disabled = was_disabled


def _fake_of(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Make a fake of a tensor; it may be elsewhere than the tensor."""
    fake: Tensor
    if tensor.device == device:
        fake = mode.from_tensor(tensor)
    else:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        with mode:
            fake = torch.empty_like(mode.from_tensor(like), device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
    if tensor.is_leaf and tensor.requires_grad:
        fake.grad_dtype = tensor.grad_dtype
    return fake


@contextmanager
def fake_micro_batch(
    work: Workload, shape: Shape, *, recompute: bool = False
) -> Iterator[tuple[Workload, Mapping[str, Tensor], LayOut]]:
    """Lend a fake copy of a workload, and a micro-batch of a shape."""
    fields = work.make_fields(*shape)
    with fake_copy(work) as (mode, theirs, lay_out), theirs.variant(recompute=recompute):
        fakes = {name: mode.from_tensor(f).to(theirs.model.device) for name, f in fields.items()}
        yield theirs, fakes, lay_out


def predict_peak(work: Workload, shape: Shape, *, recompute: bool = False) -> MemoryEstimate:
    """Predict the peak of a step whose largest micro-batch has this shape; the model is not run.

    Gradients and optimizer state are counted where they add to it. Takes 0.1 to 0.5 s for a
    transformer, whatever the shape, and compiled 2 to 4 s more for each length. `CannotRunFake`
    where the model needs values, not only shapes.
    """
    found: list[MemoryEstimate] = []
    everything = only_peak.set(True)
    try:
        for compiled in (False, True)[: 1 + (work.compiled and not recompute)]:
            with fake_micro_batch(work, shape, recompute=recompute) as (theirs, fields, lay_out):
                if compiled:  # these graphs count towards the same limit as the run's
                    compile_model(theirs.model.module, 2 * COMPILED_SHAPES, backend=UNFUSED)
                fullest = fullest_steps(theirs, lay_out(theirs.model.module), fields)
                found.append(_of_all_ranks(fullest, work))
    finally:
        only_peak.reset(everything)
    # Upper bounds, both: what Inductor fuses takes no more than unfused, nor than uncompiled.
    return min(found, key=lambda estimate: estimate.peak_bytes)


def _of_all_ranks(found: MemoryEstimate, work: Workload) -> MemoryEstimate:
    """Shrink the shards of a rank to what it holds of them among all ranks of the run."""
    run, shards = work.shards
    weights = sum(each.nbytes for each in work.model.module.parameters())
    # Beside its shards a rank has gathered weights, and gradients that are whole within a window.
    less = {"parameters": weights // run - weights // shards}
    names = ["optimizer_state", "average"]
    if work.model.setup.sync.lockstep:
        names.append("gradients")
    for name in names:
        less[name] = getattr(found, name) * (shards - run) // shards
    parts = {name: getattr(found, name) - less[name] for name in less}
    return replace(found, peak_bytes=found.peak_bytes - sum(less.values()), **parts)


@final
class Predictor:
    """Predicts the peak of a step by the shape of its largest micro-batch.

    Models that need values are probed for real, and so are LSTMs on a CPU. One on the meta device
    is not: it may be too large for this device as a whole. Where a fake cannot be compiled, memory
    is predicted uncompiled.

    The model is left bit for bit as it was; `smallest` is a shape that the run has, of few samples
    and the greatest length.
    """

    def __init__(self, work: Workload, smallest: Shape, *, recompute: bool = False) -> None:
        self._work, self._smallest, self._recompute = work, smallest, recompute
        self._predict: Predict | None = None
        self.method = PREDICTED

    def __call__(self, shape: Shape) -> MemoryEstimate:
        """Predict; once a shape cannot run fake, that and all later ones are probed."""
        work, smallest, recompute = self._work, self._smallest, self._recompute
        try:
            if self._predict is None:
                _refuse_unseen(work)
                self._predict = partial(predict_peak, work, recompute=recompute)
            return self._predict(shape)
        except CannotRunFake as answer:
            if work.compiled:
                self._work, self._predict = replace(work, compiled=False), None
                self.method = f"{PREDICTED}, as if uncompiled"
                return self(shape)
            if is_on_meta(work.model.module):
                raise
            self.method = f"memory measured on small micro-batches, as {answer}"
            self._predict = probe_peak(work, smallest, recompute=recompute)
        return self._predict(shape)


def _refuse_unseen(work: Workload) -> None:
    """Refuse what no fake shows: three quarters of the memory of an LSTM on a CPU."""
    module = work.model.module
    is_here = work.model.device.type == "cpu" and not is_on_meta(module)
    if is_here and any(isinstance(part, nn.LSTM) for part in module.modules()):
        raise CannotRunFake("an LSTM on a CPU takes memory that no shape shows")


def probe_peak(work: Workload, smallest: Shape, *, recompute: bool = False) -> Predict:
    """Fit the activations of real forward and backward passes on small shapes of whole samples.

    Three terms: constant, per position, and per pair of positions of one sample, where attention
    scores are materialised. Arguments as for `Predictor`.
    """
    length = min(smallest.length, max(PROBE_TOKENS, 2 * work.make_fields.shortest))
    lengths = dict.fromkeys((length, max(work.make_fields.shortest, length // 2)))
    # Statistics over samples need two.
    count = min(2, smallest.num_samples)
    shapes = list[Shape]()
    for each in lengths:
        for factor in (1, 2, 4):
            shapes.append(Shape(factor * count, each))
    first, *more = shapes
    with work.live(recompute=recompute):
        measured = {first: _activations(work, first)}
        for shape in more:
            with AllocationGuard():  # a step may have fewer samples than a probe
                measured[shape] = _activations(work, shape)
    rest, coefficients = resting(work), fit_shapes(measured)

    def predict(shape: Shape) -> MemoryEstimate:
        activations = max(rest.activations, int(np.dot(coefficients, terms(shape))))
        peak = rest.peak_bytes - rest.activations + activations
        return replace(rest, peak_bytes=peak, activations=activations)

    return predict


def _activations(work: Workload, shape: Shape) -> float:
    """Measure one micro-batch while gradients are there."""
    peak, fields, snapshot = PeakBytes(), work.fields(*shape), Snapshot(work.model.module)
    with peak:
        work.count(peak, fields)
        for _ in range(2):
            peak.reset()
            snapshot.take()
            work.backward(fields)
            peak.assign("gradients", gradients(work.model.module))
    return float(peak.estimate.activations)


def resting(work: Workload) -> MemoryEstimate:
    """Count what a step needs without a sample; the optimizer runs fake if the model cannot."""
    try:
        with fake_copy(work) as (_, theirs, lay_out):
            # Without a window a rank in shards has no more than in one.
            setup = replace(theirs.model.setup, sync=Deferred())
            apart = replace(theirs, model=replace(theirs.model, setup=setup))
            return _of_all_ranks(fullest_steps(apart, lay_out(theirs.model.module)), apart)
    except CannotRunFake:
        # An optimizer that needs values, too, runs on a copy of the model.
        return fullest_steps(
            replace(work, fake_ranks=None), work.on_one_rank(duplicate(work.model.module))
        )
