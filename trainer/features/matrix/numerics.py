"""Change what rounds otherwise: the kernels of attention and of the loss, and the precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.core.errors import ConfigError
from trainer.core.out_of_memory import is_out_of_memory
from trainer.core.tensors import dtype_name
from trainer.features.matrix.compared import Reference, Within, relative_distance
from trainer.features.matrix.matrix import AxisFound
from trainer.features.matrix.rounding import bound_of_rounding
from trainer.models.facts import facts_of
from trainer.objectives.next_token import TokenEntropy, in_chunks
from trainer.training.context import StepContext
from trainer.verify.case import copied

ATTENTION = {
    "attention by products": SDPBackend.MATH,
    "by flash attention": SDPBackend.FLASH_ATTENTION,
    "by memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
    "by cuDNN's attention": SDPBackend.CUDNN_ATTENTION,
}


def kernel_axis(own: Reference) -> AxisFound:
    """Attend by every kernel that runs here, and sum losses by chunks and at once.

    In evaluation mode, since kernels scale what they drop by other rules.
    """
    ran, last = list[str](), None
    case = replace(own.case, change=nn.Module.eval)
    own = Reference(case, own.pieces, case.gradient(own.pieces))
    for name, choose, within in _kernels(own):
        case = replace(own.case, change=partial(_evaluating, choose))
        try:
            with within():
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
        raise ConfigError("the model has no attention of PyTorch's, and its loss no chunks")
    return replace(last, reason=f"{own.samples}, {'; '.join(ran)}")


def _kernels(own: Reference) -> Iterator[tuple[str, Callable[[nn.Module], object], Within]]:
    context = own.case.context
    try:
        with sdpa_kernel([]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of why a GPU has none
            own.case.gradient(own.pieces[:1])
    except RuntimeError:  # it attends, for which there is no kernel now
        for name, backend in ATTENTION.items():
            yield name, nn.Module.eval, partial(sdpa_kernel, [backend])
    for name, choose in facts_of(own.case.module).kernels().items():
        yield name, choose, nullcontext
    objective, call = context.model.objective, context.model.bind(own.case.module)
    has_layer = getattr(call, "output_layer", None) is not None
    if isinstance(objective, TokenEntropy) and has_layer and not objective.z_loss:
        yield "cross entropy at once", nn.Module.eval, partial(_chunked, False)
        yield "in chunks", nn.Module.eval, partial(_chunked, True)


def _evaluating(choose: Callable[[nn.Module], object], module: nn.Module) -> None:
    choose(module.eval())


def precision_axis(context: StepContext, own: Reference) -> AxisFound:
    """Compute as the run does, and compare with float64."""
    precision, word = context.model.precision, context.model.product_word
    changed = replace(own.case, context=copied(context, None), dtype=None, precision=precision)
    found = changed.gradient(own.pieces)
    error, bound = relative_distance(found, own.expected), bound_of_rounding(own, word)
    text = f"{own.samples}, as the run computes with {dtype_name(own.case.limit_dtype)}"
    axis = AxisFound(verdict="to_rounding", reason=text, measured=error, bound=bound, dtype=word)
    if error <= bound:
        return axis
    module, text = own.blamed(found, "by more than rounding explains", changed, bound)
    return replace(axis, verdict="not_exact", reason=text, module=module)


@contextmanager
def _chunked(value: bool) -> Iterator[None]:
    token = in_chunks.set(value)
    try:
        yield
    finally:
        in_chunks.reset(token)
