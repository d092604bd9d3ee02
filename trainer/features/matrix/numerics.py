"""Change what rounds otherwise: the kernels of attention and of the loss, and the precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.tensors import dtype_name
from trainer.features.matrix.compared import (
    NotThere,
    Reference,
    Within,
    owner_of_worst,
    relative_distance,
)
from trainer.features.matrix.matrix import AxisFound
from trainer.features.matrix.rounding import rounding_bound
from trainer.models.facts import facts_of
from trainer.objectives.next_token import TokenEntropy, in_chunks
from trainer.training.context import StepContext
from trainer.verify.case import copied
from trainer.verify.trace import record_trace

Change = Callable[[nn.Module], object] | None
ATTENTION = {
    "attention by products": SDPBackend.MATH,
    "by flash attention": SDPBackend.FLASH_ATTENTION,
    "by memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
    "by cuDNN's attention": SDPBackend.CUDNN_ATTENTION,
}


def kernel_axis(own: Reference) -> AxisFound:
    """Attend by every kernel that runs here, and sum losses by chunks and at once."""
    ran, last, mode = list[str](), None, _WithoutDropout()
    with mode:
        own = replace(own, expected=own.case.gradient(own.pieces))
    for name, change, within in _kernels(own, attends=mode.attends):
        case = replace(own.case, change=change)
        try:
            with mode, within():
                gradient = case.gradient(own.pieces)
        except RuntimeError as error:  # PyTorch has no such kernel for these tensors
            if is_out_of_memory(error):
                raise
            continue
        found = own.judged(gradient, name, case, within)
        if found.verdict == "not_exact":
            return found
        last = max(found, last or found, key=lambda each: each.measured or 0.0)
        ran.append(name)
    if last is None:
        raise NotThere("the model has no attention of PyTorch's, and its loss no chunks")
    return replace(last, reason=f"{own.samples}, {'; '.join(ran)}")


def _kernels(own: Reference, *, attends: bool) -> Iterator[tuple[str, Change, Within]]:
    context = own.case.context
    if attends:
        for name, backend in ATTENTION.items():
            yield name, None, partial(sdpa_kernel, [backend])
    for name, choose in facts_of(own.case.module).kernels().items():
        yield name, choose, nullcontext
    objective, call = context.model.objective, context.model.bind(own.case.module)
    has_layer = getattr(call, "output_layer", None) is not None
    if isinstance(objective, TokenEntropy) and has_layer and not objective.z_loss:
        yield "cross entropy at once", None, partial(_chunked, False)
        yield "in chunks", None, partial(_chunked, True)


def precision_axis(context: StepContext, own: Reference) -> AxisFound:
    """Compute as the run does, and compare with float64."""
    model = context.model
    changed = replace(own.case, context=copied(context, None), dtype=None)
    changed = replace(changed, precision=model.precision)
    found, word = changed.gradient(own.pieces), model.product_word
    error = relative_distance(found, own.expected)
    sizes = [max(each.shape, default=1) for each in model.module.parameters()]
    terms = max(*sizes, sum(each.num_positions for each in own.pieces))
    bound = rounding_bound(word, len(record_trace(own.case, own.pieces[0]).calls), terms)
    measured: dict[str, Any] = {"measured": error, "bound": bound, "dtype": word}
    text = f"{own.samples}, as the run computes with {dtype_name(own.case.limit_dtype)}"
    if error <= bound:
        return AxisFound(verdict="to_rounding", reason=text, **measured)
    module = own.departing(changed, bound, nullcontext)
    text = "its output departs first, by more than rounding explains"
    if module is None:
        module, text = owner_of_worst(own.case.errors(found, own.expected)), "its gradient departs"
    return AxisFound(verdict="not_exact", reason=text, module=module, **measured)


class _WithoutDropout(TorchFunctionMode):
    """Drops nothing, since kernels scale by other rules; notes whether attention is called."""

    attends = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is F.dropout:
            return kwargs.get("input", *args[:1])
        if func is F.scaled_dot_product_attention:
            self.attends, args, kwargs = True, args[:4], {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def _chunked(value: bool) -> Iterator[None]:
    token = in_chunks.set(value)
    try:
        yield
    finally:
        in_chunks.reset(token)
