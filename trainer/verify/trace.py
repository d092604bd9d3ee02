"""Record what every module takes and gives, and compare it with other groups of samples.

A module is to blame when what goes into it agrees and what comes out does not. Its output is then
put right and the pass goes on, so that one pass names every module that is at fault, innermost
first, and no type of module needs to be known.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import filterfalse
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from trainer.accumulate.base import seed_draws, sum_of
from trainer.config.messages import clip
from trainer.core import gpu
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import is_out_of_memory
from trainer.models.bind import ModelRun
from trainer.objectives.base import Sums, sums_of
from trainer.verify.case import Case

# Stands for code that runs in no module of the model: the objective's
OUTSIDE = "\x00outside"

DTYPE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference of activations that is rounding; coupling shows at 1e-3 and more."""
LOW_TOLERANCE = 1e-2

CallKey = tuple[str, int]  # a module and how often it was called before
Tensors = dict[str, Tensor]
Losses = Mapping[str, Tensor]  # sums by term, 0-d, detached


class SampleShare(NamedTuple):
    """Where the samples of a smaller micro-batch lie within a larger one."""

    start: int  # the first; in samples, or under packing in tokens
    size: int  # how many
    total: int  # of how many
    length: int = 0  # positions per sample of the smaller one
    total_length: int = 0  # of the larger one


def shares(whole: MicroBatch, parts: Sequence[MicroBatch], *, packed: bool) -> list[SampleShare]:
    """Place micro-batches that hold, in order, the samples of a larger one."""
    # Packed samples have no rows of their own, so that their tokens are counted.
    sizes = [len(m.ids) for m in parts]
    if packed:
        sizes = [m.num_positions for m in parts]
    total, start, places = sum(sizes), 0, list[SampleShare]()
    for size, part in zip(sizes, parts, strict=True):
        length, total_length = part.num_positions // max(1, size), whole.num_positions // total
        places.append(SampleShare(start, size, total, length, total_length))
        start += size
    return places


def align(whole: Tensor, part: Tensor, share: SampleShare) -> tuple[Tensor, Tensor] | None:
    """View the same samples and positions in both.

    Dimensions that differ otherwise, such as time, are cut to what both have, from the front:
    padding is on the right. None where it cannot be known which samples they hold.
    """
    start, size, total, length, total_length = share
    if whole.dim() != part.dim() or not whole.dim():
        return None
    for dim in range(whole.dim()):
        if (whole.shape[dim], part.shape[dim]) == (total, size):
            return _crop(whole.narrow(dim, start, size), part)
    # (samples * positions, ...): modules that work on single tokens flatten so.
    if (whole.shape[0], part.shape[0]) != (total * total_length, size * length) or not size:
        return None
    rows = whole.view(total, total_length, *whole.shape[1:])
    return _crop(rows.narrow(0, start, size), part.view(size, length, *part.shape[1:]))


def _crop(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    common = tuple(slice(min(sizes)) for sizes in zip(first.shape, second.shape, strict=True))
    return first[common], second[common]


def close(first: Tensor, second: Tensor, relevant: Tensor | None = None) -> bool:
    """Whether two tensors of one shape differ by rounding, relative to the second's largest value.

    Only floating-point numbers may be rounded. Elements that are not relevant do not count.
    """
    if relevant is not None:
        first, second = first[relevant], second[relevant]
    if not second.is_floating_point() or first.dtype != second.dtype:
        return bool((first == second).all())
    finite, scale = second[torch.isfinite(second)], 0.0
    if finite.numel():
        scale = float(finite.abs().max())
    limit = DTYPE_TOLERANCE.get(second.dtype, LOW_TOLERANCE) * scale
    return torch.allclose(first, second, rtol=0.0, atol=limit, equal_nan=True)


def tensors_of(value: Any, path: str = "") -> Tensors:  # noqa: ANN401 - module arguments
    """List the tensors that a module takes or gives, by where they stand: `.0.logits`.

    Those in objects other than lists, tuples, mappings, dataclasses and namespaces are not seen.
    """
    if isinstance(value, Tensor):
        return {path: value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    found: Tensors = {}
    if isinstance(value, Mapping):
        for name, item in value.items():
            found |= tensors_of(item, f"{path}.{name}")
    return found


class Seen(NamedTuple):
    """Tensors on one side of a module call as they were, and where the loss depends on them."""

    values: Tensors  # copies, by where they stand
    # Of the loss, once it went backward, for those that autograd follows; None where it depends on
    # nothing of them
    gradients: dict[str, Tensor | None]

    @classmethod
    def of(cls, tensors: Tensors) -> Seen:
        """Copy tensors, and ask for the gradients of those that have one."""
        seen = cls({}, {})
        for path, tensor in tensors.items():
            seen.values[path] = tensor.detach().clone()
            if tensor.requires_grad:
                seen.gradients[path] = None
                # A hook on the tensor and not `retain_grad`: it means this version of the tensor,
                # also where a later module works in place.
                tensor.register_hook(partial(seen.gradients.__setitem__, path))  # type: ignore[no-untyped-call] # torch
        return seen

    def wrong(
        self, found: Tensors, share: SampleShare, *, judges_all: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """List what differs where the loss depends on it: as it should be, and as it is.

        `judges_all` is whether tensors without a gradient count, of which that cannot be known.
        """
        for path in self.values.keys() & found.keys():
            value, mask = self.values[path], None
            pair = align(value, found[path], share)
            if pair is None or not (judges_all or path in self.gradients):
                continue
            if path in self.gradients:
                gradient = self.gradients[path]
                # None: the loss depends on nothing of it.
                if gradient is None:
                    gradient = torch.zeros_like(value)
                mask = align(gradient != 0, found[path], share)
            if not close(pair[1], pair[0], mask and mask[0]):
                yield pair


class Call(NamedTuple):
    """One call of one module."""

    inputs: Seen  # what it took
    outputs: Seen  # what it gave
    # Whether autograd was on; where it was off, outputs without a gradient count too
    is_traced: bool


class Trace(NamedTuple):
    """One recorded pass: calls as they ended, and what modules (or `OUTSIDE`) that drew left."""

    micro_batch: MicroBatch
    calls: dict[CallKey, Call]
    drawn: Mapping[str, object]  # the state of the generators
    losses: Losses


class Difference(NamedTuple):
    """How one pass over some of the samples of a trace differs from it."""

    blamed: list[str]  # modules whose inputs agree and outputs do not, in order
    fields: list[str]  # of the data
    losses: Losses | None  # once what was wrong was put right; None where the pass failed
    failure: Mapping[str, str]  # what was raised, by the module that was running


def record_trace(case: Case, micro_batch: MicroBatch, off: Collection[str] = ()) -> Trace:
    """Run one micro-batch forward and backward, and record what every module took and gave.

    It takes the memory of all activations twice. Frozen weights get gradients, too, so that what
    the loss depends on is known behind them. Modules that are `off` run in evaluation mode.
    """
    recorder = _CallRecorder()
    with case.running() as run, torch.enable_grad():
        for name, part in run.module.named_modules():
            part.training &= name not in off
        for parameter in run.module.parameters():
            parameter.requires_grad_(parameter.requires_grad or parameter.is_floating_point())
        with _watching(run.module, recorder):
            # As the forward will, so that what the objective draws before it is seen.
            seed_draws(micro_batch.rng_key, run.context.world.device)
            recorder.charge()
            sums = _forward(run, micro_batch, micro_batch.rng_key)
            recorder.charge()
        total = sum_of(list(sums.losses.values()))
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call] # untyped in torch
    return Trace(micro_batch, recorder.calls, recorder.drawn, _detached(sums))


def compare(case: Case, trace: Trace, part: MicroBatch, share: SampleShare) -> Difference:
    """Run some of the samples of a trace as a micro-batch of their own, and compare."""
    whole, comparer = trace.micro_batch, _CallComparer(trace, share)
    fields = list[str]()
    for name in sorted(whole.fields.keys() & part.fields.keys()):
        pair = align(whole.fields[name], part.fields[name], share)
        if pair is not None and not close(*pair):
            fields.append(name)
    with case.running() as run, torch.no_grad():
        try:
            with _watching(run.module, comparer):
                sums = _forward(run, part, whole.rng_key)
        except Exception as error:  # a model may raise anything on a group it was not made for
            if is_out_of_memory(error):
                raise
            samples = f"{len(part.ids)} samples"
            if len(part.ids) == 1:
                samples = "one sample"
            text = clip(f"cannot run on {samples}: {type(error).__name__}: {error}")
            return Difference(comparer.blamed, fields, None, {comparer.running[-1]: text})
    return Difference(comparer.blamed, fields, _detached(sums), {})


def repeat(case: Case, trace: Trace, other: MicroBatch) -> tuple[list[str], list[str]]:
    """Run a traced micro-batch twice more, after another one, without putting the buffers back.

    Gives the modules whose results differ although nothing was drawn anew: those whose state moves,
    and those that no seed governs.
    """
    whole = trace.micro_batch
    share = SampleShare(0, len(whole.ids), len(whole.ids))
    unrepeatable = compare(case, trace, whole, share).blamed
    stateful: dict[str, None] = {}
    with case.running() as run, torch.no_grad():
        # A model may raise anything on a group it was not made for
        with suppress(Exception):
            _forward(run, other, other.rng_key)
        # State may come back to where it was with every second pass
        for _ in range(2):
            comparer = _CallComparer(trace, share)
            with _watching(run.module, comparer):
                _forward(run, whole, whole.rng_key)
            stateful |= dict.fromkeys(comparer.blamed)
    return [*filterfalse(unrepeatable.__contains__, stateful)], unrepeatable


def _forward(run: Case, micro_batch: MicroBatch, key: int) -> Sums:
    """Run a copy that was lent, from the same random numbers each time."""
    seed_draws(key, run.context.world.device)
    fields = run.cast(micro_batch).fields
    call = run.context.parallel.call
    if isinstance(call, ModelRun):
        # Whether chunks replace the output layer depends on their size.
        call = dataclasses.replace(call, is_whole=True)
    return sums_of(run.context.model.objective, call, fields, micro_batch.weights)


def _detached(sums: Sums) -> Losses:
    return {name: loss.detach() for name, loss in sums.losses.items()}


@contextmanager
def _watching(module: nn.Module, watcher: _CallRecorder | _CallComparer) -> Iterator[None]:
    counts, handles = Counter[str](), []

    def before(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        counts[name] += 1
        watcher.enter((name, counts[name] - 1), tensors_of([args, kwargs]))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        watcher.leave(tensors_of(output))

    for name, part in module.named_modules():
        # Takes no hooks; counts to what calls it
        if not isinstance(part, torch.jit.ScriptModule):
            enter = partial(before, name)
            handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> tuple[object, ...]:
    """Read the state of the generators that every step seeds: PyTorch's, NumPy's and Python's."""
    states = [torch.default_generator.get_state(), *gpu.generator_states()]
    _, keys, position, *_ = np.random.get_state()
    numpys = np.asarray(keys).tobytes(), position
    return *(state.numpy().tobytes() for state in states), numpys, random.getstate()


@final
class _CallRecorder:
    """Keeps what passes through every module, and who draws."""

    def __init__(self) -> None:
        self.calls: dict[CallKey, Call] = {}
        self.drawn: dict[str, object] = {}
        self._stack: list[tuple[CallKey, Seen, bool]] = []
        self._state: tuple[object, ...] | None = None

    def charge(self) -> None:
        """Charge what was drawn since the last event to the module that was running."""
        state = _generators()
        if self._state is not None and state != self._state:
            running = OUTSIDE
            if self._stack:
                (running, _), *_ = self._stack[-1]
            self.drawn[running] = state
        self._state = state

    def enter(self, key: CallKey, taken: Tensors) -> None:
        """Keep what a module takes, before it runs."""
        self.charge()
        self._stack.append((key, Seen.of(taken), torch.is_grad_enabled()))

    def leave(self, given: Tensors) -> None:
        """Keep what the module that ends has given."""
        self.charge()
        key, inputs, is_traced = self._stack.pop()
        self.calls[key] = Call(inputs, Seen.of(given), is_traced)


@final
class _CallComparer:
    """Blames modules, and puts right what they gave; `running` ends with the one that runs."""

    def __init__(self, trace: Trace, share: SampleShare) -> None:
        # And whether only where inputs were cut elsewhere
        self._blamed: dict[str, bool] = {}
        self.running = [OUTSIDE]
        self._trace, self._share = trace, share
        self._agreeing: list[tuple[Call | None, bool]] = []

    @property
    def blamed(self) -> list[str]:
        """The modules at fault: first those whose inputs are sure to agree."""
        return sorted(self._blamed, key=lambda name: self._blamed[name])

    def enter(self, key: CallKey, taken: Tensors) -> None:
        """Compare what a module takes with what it took in the trace."""
        self.running.append(key[0])
        call, share, is_cut = self._trace.calls.get(key), self._share, False
        if call is not None:
            known = {(share.total, share.size), (share.total_length, share.length)}
            for path in call.inputs.values.keys() & taken.keys():
                sizes = zip(call.inputs.values[path].shape, taken[path].shape, strict=False)
                # What `align` cuts of a dimension that is not the tokens' may be no padding.
                is_cut |= any(one != other and (one, other) not in known for one, other in sizes)
            if any(call.inputs.wrong(taken, share, judges_all=True)):
                call = None
        self._agreeing.append((call, is_cut))

    def leave(self, given: Tensors) -> None:
        """Blame a module that took the same and gave something else, and put that right."""
        name, (call, is_cut) = self.running.pop(), self._agreeing.pop()
        if call is None:
            return
        for right, found in call.outputs.wrong(given, self._share, judges_all=not call.is_traced):
            self._blamed[name] = is_cut and self._blamed.get(name, True)
            # An expanded tensor cannot be written to; what follows then stays as it is.
            with suppress(RuntimeError):
                found.copy_(right)
