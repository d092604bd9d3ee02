"""What the harnesses of running out of memory share: a failure at any point of any micro-batch."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.reliability import toys
from trainer.accumulate.base import Computed, GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.objectives.base import Objective, Sums
from trainer.parallel.base import Parallel

PHASES = ("forward", "loss", "backward", "middle", "end")
"""Within the forward, behind it, before the backward, within it, and at its last gradient."""

BEYOND_SAVING = "reduce"
"""What else may run out of memory: the reduction after the vote."""


class Net(toys.Net):
    """Draws from every global generator, and replaces buffers, one by another of another shape."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: Tensor
        self.cache: Tensor
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, input_ids: Tensor, fault: Tensor | None = None) -> Tensor:
        scale = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        if self.training:
            self.seen = self.seen + scale
            self.cache = torch.zeros(input_ids.shape[1])
        return super().forward(input_ids, fault) * scale


class Unreadable(toys.Rows):
    """Has a sample for which the host has no memory."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if index == 5 and self.split == "train":
            raise MemoryError(f"row {index}")
        return super().__getitem__(index)


def failure(number: int) -> Exception:
    """Give a failed allocation of one of the kinds that there are."""
    wrapped = ValueError("the model failed")
    wrapped.__cause__ = MemoryError()
    return (
        torch.OutOfMemoryError("injected"),
        RuntimeError("[enforce fail at alloc.cpp:1] . DefaultCPUAllocator: can't allocate memory"),
        MemoryError("Unable to allocate 9. EiB"),
        wrapped,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    )[number % 5]


class Struck(GradientStrategy):
    """Runs out of memory at points `rank:attempt:micro-batch:phase`; attempts count from 1."""

    def __init__(self, points: Sequence[str] = ()) -> None:
        self.points = [point.split(":") for point in points]
        self.attempts = 0

    def micro_batch(self, *given: Any) -> Computed:
        return Sum().micro_batch(*given)

    def walk(self, model: Parallel, objective: Objective, *given: Any, **how: Any) -> Computed:
        self.attempts += 1
        place = [str(model.world.rank), str(self.attempts)]
        here = [point[2:] for point in self.points if point[:2] == place]
        if not here:
            return super().walk(model, objective, *given, **how)
        number, phase = here[0]
        if phase == BEYOND_SAVING:
            model.reduce = _raising  # type: ignore[method-assign]
        with _striking(model.module, objective, int(number), phase) as struck:
            return super().walk(model, struck, *given, **how)


def _raising(*_: object) -> None:
    raise torch.OutOfMemoryError("injected")


@contextmanager
def _striking(module: nn.Module, objective: Objective, number: int, phase: str) -> Iterator[Any]:
    struck = _StruckObjective(objective, number, phase)
    blocks = getattr(module, "blocks", None)
    part = module.get_submodule("norm") if blocks is None else blocks[1]
    with ExitStack() as handles:
        for handle in (
            part.register_forward_hook(lambda *_: struck.strike("forward")),
            part.register_full_backward_hook(lambda *_: struck.strike("middle")),
        ):
            handles.callback(handle.remove)
        yield struck


class _StruckObjective:
    """Knows which micro-batch it is at, and fails there."""

    def __init__(self, inner: Objective, at: int, phase: str) -> None:
        self.inner, self.at, self.phase, self.number = inner, at, phase, -1
        self.metric_names = inner.metric_names

    def strike(self, phase: str) -> None:
        if (self.number, phase) == (self.at, self.phase):
            raise failure(self.at + PHASES.index(phase))

    def sums_weighed(
        self, model: Any, fields: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Sums:
        self.number += 1
        found = self.inner.sums_weighed(model, fields, weights)
        self.strike("loss")
        name, loss = next(iter(found.losses.items()))
        if self.phase == "backward":
            loss.register_hook(lambda _: self.strike("backward"))
        if self.phase == "end":
            loss = _Last.apply(loss, self)
        return Sums(losses={**found.losses, name: loss}, metrics=found.metrics)


class _Last(torch.autograd.Function):
    """Passes on; its own gradient is asked for after every other one of the micro-batch."""

    @staticmethod
    def forward(context: Any, loss: Tensor, struck: _StruckObjective) -> Tensor:
        context.struck = struck
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: context.struck.strike("end"))
        return gradient, None
