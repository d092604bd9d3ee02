"""Predicts the peak of a step by running it on fake tensors: no memory, no failure, no trace.

Fake tensors have shapes, types and storages of a size, and no data, so a step of any size runs in
a fraction of a second anywhere. Every allocation PyTorch would make is seen: where attention
scores are materialised, a line through two real probes is up to 51 % off and this is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.plan.memory import Shape
from trainer.tune.tensors import MemoryEstimate, PeakBytes
from trainer.tune.untouched import untouched
from trainer.tune.workload import Workload, rehearse


class CannotRunFake(Exception):  # noqa: N818 - an answer, not a fault: real probes follow
    """The model needs values, not only shapes.

    Attributes:
        reason: the operation or module that asked, in one line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@final
class _Within(nn.Module):
    """Runs a body while `functional_call` has exchanged the model's tensors."""

    def __init__(self, model: nn.Module, body: Callable[[], None]) -> None:
        super().__init__()
        self.model = model
        self.body = body

    def forward(self) -> None:
        self.body()


def run_fake(model: nn.Module, body: Callable[[FakeTensorMode], None]) -> None:
    """Run a body while every tensor of the model is a fake of itself.

    Parameters and buffers are exchanged by `functional_call`, tensors that are plain attributes
    of a module likewise; `untouched` takes care of what the body leaves behind. (A fake mode
    that merely tolerates real tensors would write fake gradients into the model.)

    Args:
        model: left bit for bit as it was.
        body: given the mode; may train the model.

    Raises:
        CannotRunFake: the body asked for a value.
    """
    mode = FakeTensorMode()
    named = [*model.named_parameters(), *model.named_buffers()]
    fakes: dict[str, Tensor] = {f"model.{name}": mode.from_tensor(tensor) for name, tensor in named}
    try:
        with untouched(model):
            for module in model.modules():
                attributes = vars(module)
                attributes.update(_faked(attributes, mode))
            with mode:
                torch.func.functional_call(_Within(model, lambda: body(mode)), fakes, ())
    except Exception as error:
        # Fake runs stop with many types (data-dependent, unsupported, assertions, plain
        # RuntimeErrors). A fault of the model's own shows again in the real run that follows.
        message = next(iter(str(error).splitlines()), "")
        raise CannotRunFake(f"{type(error).__name__}: {message}"[:200]) from error


def _faked(attributes: dict[str, Any], mode: FakeTensorMode) -> dict[str, Tensor]:
    tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    return {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}


def predict_peak(work: Workload, shape: Shape, *, recompute: bool = False) -> MemoryEstimate:
    """Predict the peak of a step whose largest micro-batch has this shape.

    Gradients and optimizer state are counted where they add to it. Takes 0.1 to 0.5 s for a
    transformer, whatever the shape.

    Args:
        work: what to compute; its model is left bit for bit as it was.
        shape: of the micro-batch.
        recompute: under activation checkpointing.

    Raises:
        CannotRunFake: the model needs values, not only shapes.
    """
    fields = work.make_fields(*shape)
    peak = PeakBytes()

    def body(mode: FakeTensorMode) -> None:
        fakes = {name: mode.from_tensor(f).to(work.device) for name, f in fields.items()}
        with peak, work.variant(recompute=recompute):
            rehearse(work, fakes, peak)

    run_fake(work.model, body)
    return peak.estimate
