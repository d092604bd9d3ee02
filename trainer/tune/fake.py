"""Predict the peak of a step by running it on fake tensors: no memory, no failure, no trace.

Fake tensors have shapes, types and storages of a size, and no data, so a step of any size runs in
a fraction of a second anywhere. Every allocation PyTorch would make is seen: where attention
scores are materialised, a line through two real probes is up to 51 % off and this is exact.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from trainer.config.messages import clip
from trainer.models.duplicate import duplicate
from trainer.plan.memory import Shape
from trainer.tune.tensors import MemoryEstimate, PeakBytes
from trainer.tune.workload import LayOut, Workload, fullest_steps, restoring


class CannotRunFake(Exception):  # noqa: N818 - an answer, not a fault: a real probe follows
    """The model needs more than shapes; says in one line what."""


@contextmanager
def fake_copy(work: Workload) -> Iterator[tuple[FakeTensorMode, Workload, LayOut]]:
    """Lend a workload around a copy of its model and objective whose every tensor is a fake.

    On a copy, nothing that a forward leaves behind, such as a cache, makes the model hold fakes.

    Yields:
        The mode, entered; the copy; and what lays it out as one rank of the run has it.

    Raises:
        CannotRunFake: the model cannot be copied, or the block asked for a value.
    """
    mode = FakeTensorMode()
    device = work.device if work.fake_ranks is None else torch.device("cpu")
    tensors = [*work.model.parameters(), *work.model.buffers()]
    memo: dict[int, object] = {id(tensor): _fake_of(tensor, mode, device) for tensor in tensors}

    ranks = nullcontext(work.alone) if work.fake_ranks is None else work.fake_ranks()
    with _answering(), restoring(nn.Module()), ranks as lay_out:
        model, objective = duplicate((work.model, work.objective), memo, mode.from_tensor)
        for parameter in model.parameters():
            parameter.grad = None
        with mode:
            yield mode, replace(work, model=model, objective=objective, device=device), lay_out


@contextmanager
def _answering() -> Iterator[None]:
    """Turn what ends a fake run into an answer, and silence PyTorch's own words.

    Raises:
        CannotRunFake: it ended.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except Exception as error:
        # Fake runs stop with many types (data-dependent, unsupported, assertions, plain
        # RuntimeErrors). A fault of the model's own shows again in the real run that follows.
        message = next(iter(str(error).splitlines()), "")
        asks = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        what = ", it computes with the values of its tensors" if asks else ""
        text = f"cannot run with fake tensors{what}: {type(error).__name__}: {message}"
        raise CannotRunFake(clip(text)) from error
    finally:
        log.disabled = was_disabled


def _fake_of(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Make a fake of a tensor; it may be elsewhere than the tensor."""
    if tensor.device == device:
        return mode.from_tensor(tensor)
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    with mode:
        empty = torch.empty_like(mode.from_tensor(layout), device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


@contextmanager
def fake_micro_batch(
    work: Workload, shape: Shape, *, recompute: bool = False
) -> Iterator[tuple[Workload, Mapping[str, Tensor], LayOut]]:
    """Lend a fake copy of a workload, and a micro-batch of a shape.

    Yields:
        The copy, the fields, and what lays the copy out.
    """
    fields = work.make_fields(*shape)
    with fake_copy(work) as (mode, theirs, lay_out), theirs.variant(recompute=recompute):
        fakes = {name: mode.from_tensor(f).to(theirs.device) for name, f in fields.items()}
        yield theirs, fakes, lay_out


def predict_peak(work: Workload, shape: Shape, *, recompute: bool = False) -> MemoryEstimate:
    """Predict the peak of a step whose largest micro-batch has this shape; the model is not run.

    Gradients and optimizer state are counted where they add to it. Takes 0.1 to 0.5 s for a
    transformer, whatever the shape.

    Raises:
        CannotRunFake: the model needs values, not only shapes.
    """
    peak = PeakBytes()
    with fake_micro_batch(work, shape, recompute=recompute) as (theirs, fields, lay_out):
        model = lay_out(theirs.model)
        with peak:
            fullest_steps(theirs, model, peak, fields)
    return peak.estimate


@final
class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Hashes the operators that run while it is entered, and everything they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.digest = hashlib.blake2b(digest_size=16)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation gives
        self.digest.update(f"{func} {tree_map(_written, (args, kwargs or {}))}".encode())
        return func(*args, **(kwargs or {}))


def _written(value: object) -> str:
    """Write an argument the same way in every process, without the address of an object."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    is_plain = isinstance(value, int | float | str | torch.dtype)
    return repr(value) if is_plain else type(value).__name__


def operators_of(work: Workload, shape: Shape) -> str | None:
    """Hash the operators of a micro-batch's forward; None where the model cannot run fake."""
    seen = _Operators()
    try:
        with fake_micro_batch(replace(work, fake_ranks=None), shape) as (theirs, fields, _), seen:
            theirs.objective.sums(theirs.call, fields)
    except CannotRunFake:
        return None
    return seen.digest.hexdigest()
