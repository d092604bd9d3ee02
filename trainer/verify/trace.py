"""Record what every module takes and gives, and compare it with other groups of samples.

A module is to blame when what goes into it agrees and what comes out does not. Its output is then
put right and the pass goes on, so that one pass names every module that is at fault, innermost
first, and no type of module needs to be known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from trainer.accumulate.base import seed_draws, sum_of
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import is_out_of_memory
from trainer.objectives.base import Sums, sums_of
from trainer.verify.align import Share, align, close, tensors_of
from trainer.verify.copies import Scratch

OUTSIDE = "\x00outside"
"""Stands for code that runs in no module of the model: the objective's."""

MAX_CHARACTERS = 190
"""Of what a model raised."""

CallKey = tuple[str, int]
"""A module and how often it was called before."""


@final
@dataclass(slots=True)
class Seen:
    """Tensors on one side of a module call, and where the loss depends on them.

    Attributes:
        values: as they were then.
        tracked: whose gradient is asked for.
        gradients: of the loss, where it depends on a tensor at all.
    """

    values: dict[str, Tensor]
    tracked: frozenset[str]
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Seen:
        """Copy tensors, and ask for the gradients of those that have one."""
        tracked = [path for path, tensor in tensors.items() if tensor.requires_grad]
        values = {path: tensor.detach().clone() for path, tensor in tensors.items()}
        seen = cls(values, frozenset(tracked))
        for path in tracked:
            # A hook on the tensor and not `retain_grad`: it means this version of the tensor,
            # also where a later module works in place.
            tensors[path].register_hook(seen._storing(path))  # type: ignore[no-untyped-call] # torch
        return seen

    def _storing(self, path: str) -> Callable[[Tensor], None]:
        def store(gradient: Tensor) -> None:
            self.gradients[path] = gradient.detach()

        return store

    def relevant(self, path: str) -> Tensor | None:
        """Tell which elements the loss depends on; None where that cannot be known."""
        if path not in self.tracked:
            return None
        if path not in self.gradients:
            return torch.zeros_like(self.values[path], dtype=torch.bool)
        return self.gradients[path] != 0


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module.

    Attributes:
        is_traced: whether autograd followed it; outputs without a gradient count only if not.
    """

    inputs: Seen
    outputs: Seen
    is_traced: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded pass over a micro-batch.

    Attributes:
        calls: in the order in which they ended.
        drawn: modules that drew random numbers themselves, in order; `OUTSIDE` for the objective.
        sums: what the objective gave.
    """

    micro_batch: MicroBatch
    calls: dict[CallKey, Call]
    drawn: tuple[str, ...]
    sums: Sums


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One pass over some of the samples of a trace.

    Attributes:
        blamed: modules whose inputs agree and outputs do not, in order.
        sums: what the objective gave once those were put right; None where the pass failed.
        failure: the module that raised, and in words what.
    """

    blamed: tuple[str, ...]
    sums: Sums | None
    failure: tuple[str, str] | None = None


def record(scratch: Scratch, micro_batch: MicroBatch) -> Trace:
    """Run one micro-batch forward and backward, and keep what every module took and gave."""
    recorder = _Recorder()
    with scratch.running() as run, torch.enable_grad():
        for parameter in run.module.parameters():
            parameter.requires_grad_(parameter.requires_grad or parameter.is_floating_point())
        with _hooked(run.module, recorder.enter, recorder.leave):
            sums = _forward(run, micro_batch, recorder.begin)
            recorder.charge()
        total = sum_of(list(sums.losses.values()))
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call] # untyped in torch
    calls, drawn = recorder.calls, tuple(recorder.drawn)
    return Trace(micro_batch=micro_batch, calls=calls, drawn=drawn, sums=_detached(sums))


def compare(scratch: Scratch, trace: Trace, part: MicroBatch, share: Share) -> Difference:
    """Run some of the samples of a trace as a micro-batch of their own, and compare.

    Args:
        scratch: as it was when the trace was recorded.
        trace: of a micro-batch that holds these samples.
        part: the samples.
        share: where they lie in the traced micro-batch.

    Raises:
        RuntimeError: memory runs out; what else a model raises is part of the result.
    """
    comparer = _Comparer(trace, share)
    with scratch.running() as run, torch.no_grad():
        hooked = _hooked(run.module, comparer.enter, comparer.leave)
        try:
            with hooked:
                sums = _forward(run, part, lambda: None, key=trace.micro_batch.rng_key)
        except Exception as error:  # a model may raise anything on a group it was not made for
            if is_out_of_memory(error):
                raise
            name = comparer.running or OUTSIDE
            samples = "one sample" if len(part.ids) == 1 else f"{len(part.ids)} samples"
            text = " ".join(f"cannot run on {samples}: {type(error).__name__}: {error}".split())
            return Difference(tuple(comparer.blamed), None, (name, text[:MAX_CHARACTERS]))
    return Difference(tuple(comparer.blamed), _detached(sums))


def repeat(scratch: Scratch, trace: Trace, other: MicroBatch) -> tuple[list[str], list[str]]:
    """Run a traced micro-batch twice more without putting the buffers back.

    Args:
        scratch: as it was when the trace was recorded.
        trace: of the micro-batch.
        other: another one, which leaves another state behind.

    Returns:
        Modules that gave something else although nothing was drawn anew: those whose state moves,
        in buffers or outside of them, and those that no seed governs.
    """
    whole = trace.micro_batch
    size = len(whole.ids)
    share = Share(start=0, size=size, total=size, length=0, total_length=0)
    again = compare(scratch, trace, whole, share)
    unrepeatable, blamed = set(again.blamed), dict.fromkeys(again.blamed)
    with scratch.running() as run, torch.no_grad():
        with suppress(Exception):  # a model may raise anything on a group it was not made for
            _forward(run, other, lambda: None)
        for _ in range(2):  # state may come back to where it was with every second pass
            comparer = _Comparer(trace, share)
            with _hooked(run.module, comparer.enter, comparer.leave):
                _forward(run, whole, lambda: None)
            blamed |= comparer.blamed
    stateful = [name for name in blamed if name not in unrepeatable]
    return stateful, [name for name in blamed if name in unrepeatable]


def _forward(
    scratch: Scratch, micro_batch: MicroBatch, begin: Callable[[], None], *, key: int | None = None
) -> Sums:
    seed_draws(micro_batch.rng_key if key is None else key, scratch.kit.world.device)
    begin()
    kit, fields = scratch.kit, scratch.cast(micro_batch).fields
    return sums_of(kit.objective, kit.model.call, fields, micro_batch.weights)


def _detached(sums: Sums) -> Sums:
    return Sums(losses={name: loss.detach() for name, loss in sums.losses.items()})


@contextmanager
def _hooked(
    module: nn.Module,
    enter: Callable[[str, dict[str, Tensor]], None],
    leave: Callable[[dict[str, Tensor]], None],
) -> Iterator[None]:
    """Call around every call of every module."""

    def before(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: enter(name, tensors_of([args, kwargs]))

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:  # noqa: ANN401
        leave(tensors_of(output))

    handles = []
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):  # takes no hooks; counts to what calls it
            continue
        handles.append(part.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(part.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> bytes:
    """Read the state of the generators that every step seeds: PyTorch's, NumPy's and Python's."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # untyped in torch
        states += torch.cuda.get_rng_state_all()
    _, keys, position, *_ = np.random.get_state()
    others = str((position, random.getstate()))
    return b"".join(
        [*(s.numpy().tobytes() for s in states), np.asarray(keys).tobytes(), others.encode()]
    )


@final
class _Recorder:
    """Keeps what passes through every module, and who draws."""

    def __init__(self) -> None:
        self.calls: dict[CallKey, Call] = {}
        self.drawn: dict[str, None] = {}
        self._stack: list[tuple[CallKey, Seen, bool]] = []
        self._counts: Counter[str] = Counter()
        self._state = b""

    def begin(self) -> None:
        self._state = _generators()

    def charge(self) -> None:
        """Charge what was drawn since the last event to the module that was running."""
        state = _generators()
        if state != self._state:
            self.drawn[self._stack[-1][0][0] if self._stack else OUTSIDE] = None
        self._state = state

    def enter(self, name: str, taken: dict[str, Tensor]) -> None:
        self.charge()
        key = name, self._counts[name]
        self._counts[name] += 1
        self._stack.append((key, Seen.of(taken), torch.is_grad_enabled()))

    def leave(self, given: dict[str, Tensor]) -> None:
        self.charge()
        key, inputs, is_traced = self._stack.pop()
        self.calls[key] = Call(inputs, Seen.of(given), is_traced)


@final
class _Comparer:
    """Blames modules, and puts right what they gave."""

    def __init__(self, trace: Trace, share: Share) -> None:
        self.blamed: dict[str, None] = {}
        self._trace = trace
        self._share = share
        self._stack: list[tuple[CallKey, bool]] = []
        self._counts: Counter[str] = Counter()

    @property
    def running(self) -> str | None:
        """The module that is running, and that raised if the pass failed."""
        return self._stack[-1][0][0] if self._stack else None

    def enter(self, name: str, taken: dict[str, Tensor]) -> None:
        key = name, self._counts[name]
        self._counts[name] += 1
        call = self._trace.calls.get(key)
        agrees = call is not None and not self._wrong(call.inputs, taken, judges_all=True)
        self._stack.append((key, agrees))

    def leave(self, given: dict[str, Tensor]) -> None:
        key, agrees = self._stack.pop()
        if not agrees:
            return
        call = self._trace.calls[key]
        wrong = self._wrong(call.outputs, given, judges_all=not call.is_traced)
        if wrong:
            self.blamed[key[0]] = None
        for right, found in wrong:
            # An expanded tensor cannot be written to; what follows then stays as it is.
            with suppress(RuntimeError):
                found.copy_(right)

    def _wrong(
        self, seen: Seen, found: dict[str, Tensor], *, judges_all: bool
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """List what differs where the loss depends on it: as it should be, and as it is."""
        wrong = []
        for path in seen.values.keys() & found.keys():
            relevant = seen.relevant(path)
            if relevant is None and not judges_all:
                continue
            pair = align(seen.values[path], found[path], self._share)
            if pair is None:
                continue
            mask = None if relevant is None else align(relevant, found[path], self._share)
            if not close(pair[1], pair[0], None if mask is None else mask[0]):
                wrong.append(pair)
        return wrong
