"""Prove on the user's own model and data that the planned step equals the whole-batch step.

The gradient of one planned step is compared with that of the whole global batch in one piece, in
float64, where a wrong normalizer or a coupled layer stands out by ten orders of magnitude. A model
that runs in float32 only is compared in float32, where a limit of 1e-4 tells less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch

from trainer.config.messages import clip, first_of
from trainer.core import gpu
from trainer.core.errors import ConfigError, DoesNotFitError, TrainError
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, is_out_of_memory, no_replay, release_memory
from trainer.core.tensors import dtype_name
from trainer.optim.optimizers import hooked
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext
from trainer.verify.case import Case, copied
from trainer.verify.comparison import EXACT, Errors, Gradient
from trainer.verify.diagnose import LOW, check_recomputed, diagnose, low_precision
from trainer.verify.find_module import Faults, Found, NamedReasons, Reason, examine
from trainer.verify.report import Verdict, VerifyReport
from trainer.verify.trace import OUTSIDE

WORST_FIRST: tuple[Verdict, ...] = ("not_exact", "not_proven", "exact_without_dropout")
"""What culprits may lead to; without any the step is exact."""

MAX_WORST = 10


def verify(
    context: StepContext, batch: PlannedBatch, feed: Feed, *, whole_fits: bool
) -> VerifyReport:
    """Compare the gradient of a planned step with the whole batch's.

    A step planned as one micro-batch is compared with its samples one by one, which proves more;
    where they differ through its modules alone, it is the whole batch's step all the same. Where
    the whole batch in one piece does not fit into memory, the reference is one sample a pass,
    summed, or the smallest groups that the model runs on. Random generators are put back.
    """
    devices = list[torch.device]()
    if gpu.is_gpu(context.world.device):
        devices.append(context.world.device)
    with torch.random.fork_rng(devices=devices):
        try:
            return _verify(context, batch, feed, whole_fits=whole_fits)
        finally:
            # A copy that shares weights with it has left its gradients there.
            context.parallel.drop_gradients()


def _verify(
    context: StepContext, batch: PlannedBatch, feed: Feed, *, whole_fits: bool
) -> VerifyReport:
    case, planned, notes = _plan(context, batch, feed)
    uncopied, whole = [*_uncopied(context)], replace(case, size=case.num_samples)
    is_one_piece = case.batch.plan.num_micro_batches == 1
    case, expected = _refer(case, whole_first=whole_fits and not is_one_piece)
    errors, low = case.errors(planned, expected), low_precision(context.model.module)
    whole_errors, why = errors, list[str]()
    if is_one_piece and case.size < case.num_samples:
        why = ["the plan is one micro-batch, so it is compared with smaller ones, a stronger check"]
    elif case.size < case.num_samples:
        fault = "is not sure to fit into memory"
        if whole_fits:
            fault = "ran out of memory"
        why = [f"the whole batch in one piece {fault} in {dtype_name(case.limit_dtype)}"]
    if low is not None:
        as_is = replace(case, context=copied(context, None), dtype=None)
        errors = case.errors(as_is.gradient(), expected)
        why.append(f"the planned step in {low}, as the weights are")
    elif is_one_piece and not errors.is_exact:
        whole_errors = whole.errors(planned, whole.gradient([whole.load(whole.positions)]))
    case, found = examine(case)
    if whole_errors.is_exact and low is None and not (errors.is_exact or found.sums):
        case, errors, why = replace(case, size=case.num_samples), whole_errors, []
    if is_one_piece and case.size == case.num_samples:
        why.append("the plan is one micro-batch, the whole batch: no other cut was compared")
    culprits, rest = found.sums, errors
    if not errors.is_exact:
        culprits, rest = diagnose(case, context, found, planned, expected, traces_whole=whole_fits)
    errors, rest, moved = check_recomputed(whole, errors, rest)
    culprits = [*moved, *culprits]
    notes += [*why, *_asides(case, errors, found, culprits)]
    culprits = [*culprits, *uncopied]
    verdicts = {reason.verdict for _, reason in culprits}
    verdict: Verdict = next((v for v in WORST_FIRST if v in verdicts), "exact")
    limit, error_without_draws = errors.limit, None
    # `rest` are the errors without draws.
    if verdict == "exact_without_dropout":
        limit, error_without_draws = rest.limit, rest.largest
    return VerifyReport(
        verdict=verdict,
        error_without_draws=error_without_draws,
        max_relative_error=errors.largest,
        reference=case.reference,
        dtype=dtype_name(case.limit_dtype),
        worst=tuple(errors.worst[:MAX_WORST]),
        culprits=tuple((name, reason.text) for name, reason in culprits),
        num_parameters=len(planned.keys() | expected.keys()),
        micro_batches=case.batch.plan.num_micro_batches,
        global_batch=case.num_samples,
        limit=limit,
        notes=tuple(notes),
    )


def _plan(
    context: StepContext, batch: PlannedBatch, feed: Feed
) -> tuple[Case, Gradient, list[str]]:
    """Compute the planned gradient in float64, or float32 where the model fixes that; add notes."""
    notes = list[str]()
    for dtype in (torch.float64, torch.float32):
        try:
            with no_replay(f"copying the model in {dtype_name(dtype)}, for train verify"):
                copy = copied(context, dtype)
            case = Case(context=copy, dtype=dtype, batch=batch, feed=feed)
            case, planned = _fit(case)
            break
        except Exception as error:  # a model that fixes its precision may raise anything
            if isinstance(error, TrainError) or dtype == torch.float32:
                raise
            why = clip(f"{type(error).__name__}: {error}")
            notes.append(
                f"the model does not run in float64 ({why}), so this proves what float32 can: no "
                f"error beyond {EXACT[torch.float32]:g}"
            )
    low = ", ".join(map(dtype_name, filter(case.undone.__contains__, LOW)))
    if low and low_precision(context.model.module) is None:
        notes.append(f"casts to {low} by hand in the model are undone in float64")
    asked, used = batch.plan.num_micro_batches, case.batch.plan.num_micro_batches
    if used != asked:
        few = f"the run's {asked}, which do not fit into memory in {dtype_name(dtype)}"
        notes.append(f"cut into {used} micro-batches instead of {few}")
    return case, planned, notes


def _fit(case: Case) -> tuple[Case, Gradient]:
    """Compute the planned gradient, cut finer, as the run itself would, while memory runs out."""
    dtype = dtype_name(case.limit_dtype)
    while True:
        with AllocationGuard():
            return case, case.gradient()
        release_memory()
        batch, feed = case.batch, case.feed
        cut = feed.cut.smaller(batch.plan)
        if cut is None:
            sample, length = batch.largest_sample()
            raise DoesNotFitError(
                f"train verify: sample {sample} of {length} tokens does not fit into memory in "
                f"{dtype}, even alone: lower data.max_length"
            )
        feed.use(cut)
        case = replace(case, batch=replace(batch, plan=cut.cut(batch.plan.lengths, feed.layout)))
        parts = list[MicroBatch]()
        for slot in chain.from_iterable(case.batch.plan.ranks):
            if len(slot):
                parts.append(case.load(slot))
        case = replace(case, batch=replace(case.batch, micro_batches=tuple(parts)))


def _refer(case: Case, *, whole_first: bool) -> tuple[Case, Gradient]:
    """Compute the best reference that the model runs on and the memory holds."""
    num_samples, refusal, least = case.num_samples, "", case.batch.plan.group_size
    sizes, size = list[int](), least
    while size < num_samples:
        sizes.append(size)
        size *= 2
    if whole_first:
        sizes.insert(0, num_samples)
    else:
        sizes.append(num_samples)
    for size in sizes:
        sized = replace(case, size=size)
        try:
            return sized, sized.expected()
        except Exception as error:  # a norm over samples, for one, refuses a single value
            if isinstance(error, TrainError):
                raise
            if not is_out_of_memory(error):
                refusal = clip(f"{type(error).__name__}: {error}")
        release_memory()
    if refusal:
        raise ConfigError(
            f"model: it runs on no group of samples but the planned micro-batches ({refusal}), so "
            "train verify has nothing to compare them with"
        )
    raise DoesNotFitError(
        "train verify: no group of samples fits into memory in "
        f"{dtype_name(case.limit_dtype)}: lower data.max_length"
    )


def _uncopied(context: StepContext) -> Faults:
    """Name the weights of the run's own model whose hooks, or gradients, a copy does not show."""
    named = dict(context.model.module.named_parameters())
    for name in hooked(context.model.module):
        text = (
            "has a hook on its gradient, which runs for every micro-batch and is not copied with "
            "the model, so nothing is proven: move its work into the optimizer's step, once per "
            "step, or remove it"
        )
        if named[name].requires_grad:
            yield name, Reason(text, "not_proven")
    reached = list[str]()
    for name, parameter in named.items():
        if parameter.grad is not None:
            reached.append(name)
    if reached:
        text = (
            "got a gradient from verify's copy of the model, through a function or scripted module "
            "that cannot be copied, so nothing is proven: write it as a method of the module"
        )
        yield first_of(reached), Reason(text, "not_proven")


def _asides(case: Case, errors: Errors, found: Found, culprits: NamedReasons) -> Iterator[str]:
    """Say what the verdict leaves open, and what this batch could not show."""
    if not found.was_checked:
        yield "the loss sums were not checked on their own: fewer than two samples fit into memory"
    if errors.is_exact and (found.quiet or found.loud):
        names = {OUTSIDE: "the objective", "": "the model itself"}
        drawn = first_of([names.get(name, name) for name in (*found.quiet, *found.loud)])
        yield f"{drawn}: draws at random, without effect here; another step may differ"
    if errors.is_exact and culprits:
        yield "the gradients agree by coincidence: other micro-batches or batches would differ"
    if not any(any(m.weights.values()) for m in case.batch.micro_batches):
        yield "no sample of this batch has a loss term, so nothing is checked: try another seed"
    if case.plain:
        yield (
            f"{first_of(sorted(case.plain))}: a tensor in a plain attribute is neither saved in "
            "checkpoints nor restored after a replay, a skipped step or tuning: if forward "
            "changes it, make it a buffer (register_buffer)"
        )
    if errors.cancelled:
        yield (
            f"{first_of(errors.cancelled)}: differs by no more than the rounding of larger "
            "terms; its error is relative to the largest gradient"
        )
