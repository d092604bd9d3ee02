"""Compute a few samples of a step in other ways, one change at a time, and compare gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from trainer.config.messages import clip
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError, TrainError
from trainer.core.format import plural
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import is_out_of_memory, release_memory
from trainer.core.run_folder import RunFolder
from trainer.core.tensors import dtype_name
from trainer.data.samples import INPUT_IDS
from trainer.features.matrix.matrix import AxisFound
from trainer.features.matrix.rounding import rounding_bound
from trainer.models.compilation import COMPILED_SHAPES, compile_model
from trainer.models.recompute import can_recompute, checkpoint_blocks
from trainer.objectives.next_token import TokenEntropy, in_chunks
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext
from trainer.tune.packed_documents import packing_fault, packs
from trainer.verify.case import Case, copied
from trainer.verify.comparison import Errors, Gradient
from trainer.verify.diagnose import compare_recomputed
from trainer.verify.find_module import examine
from trainer.verify.reduced import UNITS, as_step
from trainer.verify.report import VerifyReport
from trainer.verify.trace import record_trace

Change = Callable[[nn.Module], object]
Within = Callable[[], AbstractContextManager[object]]

ATTENTION = {
    "attention by products": SDPBackend.MATH,
    "by flash attention": SDPBackend.FLASH_ATTENTION,
    "by memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
    "by cuDNN's attention": SDPBackend.CUDNN_ATTENTION,
}


class _NotThere(Exception):  # noqa: N818 - no error
    """Why a way cannot be run here."""


@final
@dataclass(frozen=True)
class _Reference:
    """A few samples of the step, and their gradient by the run's own execution, without draws."""

    case: Case
    pieces: Sequence[MicroBatch]
    expected: Gradient

    @classmethod
    def of(cls, case: Case, size: int = 2) -> _Reference:
        """Compute the first samples of the step, so many, or groups of them, in a micro-batch."""
        units = case.units()[:UNITS]
        groups = [np.concatenate(units[i : i + size]) for i in range(0, len(units), size)]
        pieces = as_step(case, groups)
        return cls(case, pieces, case.gradient(pieces))

    def judged(
        self, found: Gradient, what: str, changed: Case | None = None, within: Within = nullcontext
    ) -> AxisFound:
        """Compare a gradient; where it is another, name the module whose output departs first."""
        errors = self.case.errors(found, self.expected)
        module, reason = None, f"{_samples(self.pieces)}, {what}"
        if not errors.is_exact:
            limit = 10 * errors.limit
            module = changed and _first_departing(self, changed, limit, within)
            reason = f"its output differs {what}"
            if module is None:
                module, reason = _owner_of_worst(errors), f"its gradient differs {what}"
        return _verdict(errors, self.case.limit_dtype, reason, module)


def compare_axes(
    context: StepContext, batch: PlannedBatch, feed: Feed, report: VerifyReport, folder: Path
) -> Mapping[str, AxisFound]:
    """Give what each way makes of the step, by its name."""
    dtype = getattr(torch, report.dtype)
    case, _ = examine(Case(context=copied(context, dtype), dtype=dtype, batch=batch, feed=feed))
    own = _Reference.of(case)
    ways: Mapping[str, Callable[[], AxisFound]] = {
        "cut": partial(_cut, report),
        "ranks": partial(_ranks, folder),
        "packing": partial(_packing, context, own),
        "recomputation": partial(_recomputation, context, own),
        "kernel": partial(_kernel, own),
        "compile": partial(_compile, own),
        "precision": partial(_precision, context, own),
    }
    return {name: _tried(way) for name, way in ways.items()}


def _tried(way: Callable[[], AxisFound]) -> AxisFound:
    try:
        return way()
    except _NotThere as reason:
        text = str(reason)
    except Exception as error:  # what is not made for it may raise anything
        if isinstance(error, TrainError) and not isinstance(error, ConfigError):
            raise
        text = clip(f"{type(error).__name__}: {error}")
        if is_out_of_memory(error):
            text = "memory ran out"
    release_memory()
    return AxisFound(verdict="not_there", reason=text)


def _cut(report: VerifyReport) -> AxisFound:
    """Repeat what verify found."""
    error, what = report.max_relative_error, f"{report.global_batch} samples as planned, with: "
    what += report.reference
    if report.error_without_draws is not None:
        error, what = report.error_without_draws, f"{what}; without random draws"
    if report.verdict in {"not_exact", "not_proven"}:
        module, reason = report.culprits[0]
        found = AxisFound(verdict="not_exact", reason=reason, module=module)
    else:
        found = AxisFound(verdict=_word(getattr(torch, report.dtype)), reason=what)
    return replace(found, measured=error, bound=report.limit, dtype=report.dtype)


def _ranks(folder: Path) -> AxisFound:
    """Read what two ranks have found, in processes of their own."""
    path = folder / RunFolder.VERIFY
    if not path.exists():
        raise _NotThere("the model runs in neither float64 nor float32 there, or a launcher began")
    found = read_json(path)
    text = f"{found['global_batch']} samples over two ranks with one process, in one piece"
    axis = AxisFound(verdict=_word(getattr(torch, found["dtype"])), reason=text)
    if found["verdict"] != "exact":
        module = found["culprits"][0]
        axis = AxisFound(verdict="not_exact", **module)
    error, limit = found["max_relative_error"], found["limit"]
    return replace(axis, measured=error, bound=limit, dtype=found["dtype"])


def _packing(context: StepContext, own: _Reference) -> AxisFound:
    """Lay documents end to end, and compare with padded ones."""
    case, loader, unfit = own.case, context.data.loader, None
    facts, kind = loader.dataset.facts, context.model.coupling.kind
    if facts.collate is not None or kind == "batch" or INPUT_IDS not in own.pieces[0].fields:
        unfit = "this data set or objective cannot use packed samples"
    module, call = context.model.module, context.model.bind(context.model.module)
    try:
        fault = partial(packing_fault, loader, module, call)
        device, precision = context.world.device, context.model.precision
        packs(True, module, unfit=unfit, device=device, precision=precision, fault=fault)
    except ConfigError as error:
        text = str(error).removeprefix("accum.packed=true: ")
        raise _NotThere(text.removesuffix("; use accum.packed=false")) from error
    plan = case.batch.plan
    packed, padded = (
        replace(case, batch=replace(case.batch, plan=replace(plan, packed=is_packed)))
        for is_packed in (True, False)
    )
    row = _Reference.of(packed, UNITS)
    found = _Reference.of(padded).judged(row.expected, "end to end in one row, with padded ones")
    if found.verdict == "not_exact":
        for name, reason in examine(packed)[1].modules[:1]:
            text = f"documents of one row change each other: {reason.text}"
            found = replace(found, module=name, reason=text)
    return found


def _recomputation(context: StepContext, own: _Reference) -> AxisFound:
    """Compute every block again in backward, where casts by hand to float32 are not undone."""
    if not can_recompute(own.case.module):
        raise _NotThere("the model has no list of blocks (nn.ModuleList) to recompute")
    found = None
    for dtype in (own.case.dtype, torch.float32):
        case = replace(own.case, context=copied(context, dtype), dtype=dtype)
        try:
            errors, named = compare_recomputed(case, own.pieces, checkpoint_blocks)
        except CheckpointError as error:
            owner, reason = type(case.module).__name__, clip(f"cannot be recomputed: {error}")
            found = AxisFound(verdict="not_exact", reason=reason, module=owner)
            continue
        reason = f"{_samples(own.pieces)}, every block with none; buffers too"
        found = _verdict(errors, case.limit_dtype, reason, None)
        if not errors.is_exact:
            found = replace(found, module=_owner_of_worst(errors), reason="differs each time")
        for name, why in named[:1]:
            found = replace(found, module=name, reason=why.text)
        break
    assert found is not None
    return found


def _kernel(own: _Reference) -> AxisFound:
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
        raise _NotThere("the model has no attention of PyTorch's, and its loss no chunks")
    return replace(last, reason=f"{_samples(own.pieces)}, {'; '.join(ran)}")


def _kernels(own: _Reference, *, attends: bool) -> Iterator[tuple[str, Change | None, Within]]:
    context = own.case.context
    if attends:
        for name, backend in ATTENTION.items():
            yield name, None, partial(sdpa_kernel, [backend])
    choose: Any = getattr(own.case.module, "set_attn_implementation", None)
    if callable(choose):
        for name in ("eager", "sdpa"):
            yield f"attn_implementation={name}", partial(_attend_by, name), nullcontext
    objective, call = context.model.objective, context.model.bind(own.case.module)
    has_layer = getattr(call, "output_layer", None) is not None
    if isinstance(objective, TokenEntropy) and has_layer and not objective.z_loss:
        yield "cross entropy at once", None, partial(_chunked, False)
        yield "in chunks", None, partial(_chunked, True)


def _compile(own: _Reference) -> AxisFound:
    """Compile one graph of the smallest shapes: of the two shortest samples."""
    if own.case.holds_draws:
        raise _NotThere("the model draws at random, by other numbers once it is compiled")
    case, lengths = own.case, own.case.batch.plan.lengths
    units = sorted(case.units(), key=lambda unit: int(lengths[unit].max()))[:2]
    pieces = as_step(case, [np.concatenate(units)])
    small = _Reference(case, pieces, case.gradient(pieces))
    changed = replace(case, change=lambda module: compile_model(module, COMPILED_SHAPES))
    return small.judged(changed.gradient(pieces), "compiled with eager")


def _precision(context: StepContext, own: _Reference) -> AxisFound:
    """Compute as the run does, and compare with float64."""
    model = context.model
    changed = replace(own.case, context=copied(context, None), dtype=None)
    changed = replace(changed, precision=model.precision)
    found, word = changed.gradient(own.pieces), model.product_word
    error = _distance(found, own.expected)
    sizes = [max(each.shape, default=1) for each in model.module.parameters()]
    terms = max(*sizes, sum(each.num_positions for each in own.pieces))
    bound = rounding_bound(word, len(record_trace(own.case, own.pieces[0]).calls), terms)
    measured: dict[str, Any] = {"measured": error, "bound": bound, "dtype": word}
    text = f"{_samples(own.pieces)}, as the run computes with {dtype_name(own.case.limit_dtype)}"
    if error <= bound:
        return AxisFound(verdict="to_rounding", reason=text, **measured)
    module = _first_departing(own, changed, bound, nullcontext)
    text = "its output departs first, by more than rounding explains"
    if module is None:
        module, text = _owner_of_worst(own.case.errors(found, own.expected)), "its gradient departs"
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


def _attend_by(name: str, module: Any) -> None:  # noqa: ANN401 - a model of transformers
    module.set_attn_implementation(name)
    # transformers warns, and keeps the kernel, where a model does not take the one chosen.
    if module.config._attn_implementation != name:
        raise RuntimeError(f"{type(module).__name__} has no {name}")


@contextmanager
def _chunked(value: bool) -> Iterator[None]:
    token = in_chunks.set(value)
    try:
        yield
    finally:
        in_chunks.reset(token)


def _first_departing(own: _Reference, changed: Case, limit: float, within: Within) -> str | None:
    """Name the first module whose forward ends with another output, innermost first."""
    plain = record_trace(own.case, own.pieces[0])
    with within():
        other = record_trace(changed, own.pieces[0])
    for key, call in plain.calls.items():
        if key not in other.calls:
            continue
        theirs, ours = call.outputs.values, other.calls[key].outputs.values
        shared = {path: ours[path] for path in theirs if path in ours}
        if shared and _distance(shared, {path: theirs[path] for path in shared}) > limit:
            return key[0] or type(own.case.module).__name__
    return None


def _distance(found: Gradient, expected: Gradient) -> float:
    """Give the 2-norm of a difference, relative to that of what is expected."""
    apart = whole = 0.0
    for name, theirs in expected.items():
        ours = found.get(name, torch.zeros_like(theirs))
        apart += float((ours.double() - theirs.double()).square().sum())
        whole += float(theirs.double().square().sum())
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)


def _samples(pieces: Sequence[MicroBatch]) -> str:
    return plural(sum(len(each.ids) for each in pieces), "sample")


def _word(dtype: torch.dtype) -> Literal["exact", "to_rounding"]:
    """Float32 proves what it can: no error beyond its rounding."""
    return "exact" if dtype == torch.float64 else "to_rounding"


def _verdict(errors: Errors, dtype: torch.dtype, reason: str, module: str | None) -> AxisFound:
    return AxisFound(
        verdict=_word(dtype) if errors.is_exact else "not_exact",
        reason=reason,
        module=module,
        measured=errors.largest,
        bound=errors.limit,
        dtype=dtype_name(dtype),
    )


def _owner_of_worst(errors: Errors) -> str:
    name, _ = errors.worst[0]
    return name.rpartition(".")[0] or name
