"""Find why a step is not exact: put one suspect after another right, and compare what remains.

So every culprit is named, and none for another's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import filterfalse

import numpy as np
import torch
from torch import nn

from trainer.accumulate.base import reference_kind
from trainer.accumulate.sum import Sum
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard
from trainer.core.tensors import bits_of, dtype_name, gradient_dtype
from trainer.models.recompute import recompute_nothing, recomputes
from trainer.parallel.base import trained_parameters
from trainer.plan.cut import IntArray
from trainer.training.context import StepContext
from trainer.verify.case import Case
from trainer.verify.comparison import Errors, Gradient, is_finite
from trainer.verify.find_module import Found, NamedReasons, Reason, find_modules, name_reasons
from trainer.verify.report import Verdict
from trainer.verify.trace import OUTSIDE

# In which adding up micro-batches loses bits
LOW = (torch.bfloat16, torch.float16)
LOUD = (
    ", in evaluation mode too or by means that cannot be made constant, so that the rest of the "
    "step cannot be checked without it; draw with PyTorch where `self.training` is true, or switch "
    "it off"
)
MAX_TRACED = 8  # micro-batches that are taken apart
# Errors that a model which loses digits on the way may have by rounding alone
AMPLIFIED = {torch.float64: 1e-7, torch.float32: 1e-2}
RUNS_AGAIN = Reason(
    "comes out otherwise as its forward runs again in backward (activation_checkpointing): make "
    "what it writes a buffer (register_buffer), or type activation_checkpointing=false"
)


def low_precision(module: nn.Module) -> str | None:
    """Name the dtype of trained parameters that accumulate in fewer bits than fp32, if any."""
    dtypes = {*map(gradient_dtype, trained_parameters(module))}
    for dtype in LOW:
        if dtype in dtypes:
            return dtype_name(dtype)
    return None


def diagnose(
    case: Case,
    context: StepContext,
    found: Found,
    planned: Gradient,
    expected: Gradient,
    *,
    traces_whole: bool,
) -> tuple[NamedReasons, Errors]:
    """Name the culprits of a step that is not exact, first what random draws do not explain.

    Also gives the errors that are left with the draws held, and without a mean of means. `case` has
    its draws held, by `examine`, which gave `found`. `traces_whole` is whether what every module
    gives for the whole batch fits into memory.
    """
    errors, culprits, drawing = case.errors(planned, expected), NamedReasons(), NamedReasons()
    kind = reference_kind(context.model.normalizer)
    if (low := low_precision(context.model.module)) is not None:
        text = (
            f"{low} weights: their gradients lose bits as micro-batches accumulate (the plan in "
            f"{dtype_name(case.limit_dtype)}: {errors.largest:.0e}); keep fp32 weights and use "
            "precision=bf16"
        )
        culprits.append(("parameters", Reason(text)))
    if kind != context.model.normalizer and not errors.is_exact:
        errors = case.errors(case.gradient(kind=kind), expected)
        name, remedy = "batch.normalizer=micro_batches", "use batch.normalizer=tokens"
        text = f"a mean of means: a token's weight depends on its micro-batch; {remedy}"
        culprits.append((name, Reason(text)))
    if not errors.is_exact and (found.quiet or found.loud):
        expected = case.expected()
        errors = case.errors(case.gradient(kind=kind), expected)
        drawing = _drawing(case, found, errors)
    if errors.is_exact:
        return [*culprits, *drawing, *found.sums], errors
    if hidden := _unproven(case, errors, planned, expected):
        return [*culprits, *hidden, *found.sums, *drawing], errors
    named = [*found.modules, *found.sums]
    if not (named or found.loud):
        may_sum = context.model.objective.coupling.kind in Sum.couplings
        if may_sum and case.errors(case.gradient(kind=kind, strategy=Sum()), expected).is_exact:
            name = type(context.model.strategy).__name__
            text = f"{name} does not sum the micro-batches' gradients; their sum would be exact"
            return [*culprits, ("accum.gradient", Reason(text)), *drawing], errors
        named = _search_step(case, errors, traces_whole=traces_whole)
    causes = [*culprits]
    for group in (named, drawing):
        causes += [*filterfalse(causes.__contains__, group)]
    return causes, errors


def _drawing(case: Case, found: Found, errors: Errors) -> NamedReasons:
    """Name what draws at random; `errors` are with the draws held."""
    draws = "draws at random anew for every micro-batch"
    verdict: Verdict = "not_proven"
    outcome = f"; with it off the step still differs (error {errors.largest:.0e}), see above"
    if errors.is_exact:
        verdict = "exact_without_dropout"
        off = f"exact with it off (error {errors.largest:.0e})"
        outcome = f", so it depends on the micro-batches: the step is {off}; set its rate to 0, or "
        outcome += "accept it"
    reasons = dict.fromkeys(found.loud, Reason(f"{draws}{LOUD}", "not_proven"))
    reasons |= dict.fromkeys(found.quiet, Reason(f"{draws}{outcome}", verdict))
    named = NamedReasons()
    if outside := reasons.pop(OUTSIDE, None):
        named.append((case.objective_name, outside))
    return [*named, *name_reasons(dict(case.module.named_modules()), reasons)]


def _unproven(case: Case, errors: Errors, *gradients: Gradient) -> NamedReasons:
    """Tell whether no gradient is finite, or the error may be due to rounding alone."""
    if not any(map(is_finite, gradients)):
        text = "the loss or its gradient is not finite (nan or inf), however the step is cut"
        return [("gradient", Reason(text, "not_proven"))]
    most = AMPLIFIED[case.limit_dtype]
    if errors.largest > most:
        return []
    reason = Reason(
        f"the step differs by {errors.largest:.0e}, more than by rounding as a rule "
        f"({errors.limit:.0e}) and less than what depends on the micro-batches does ({most:.0e}), "
        "so nothing is proven: look for large numbers that cancel",
        verdict="not_proven",
    )
    return [("rounding", reason)]


def _search_step(case: Case, errors: Errors, *, traces_whole: bool) -> NamedReasons:
    """Take the step's own micro-batches apart: a few samples may be too few to show a coupling."""
    # Ranks may have a last micro-batch without a sample.
    counts = [*filter(None, (len(m.ids) for m in case.batch.micro_batches))]
    slots, size = np.split(case.positions, np.cumsum(counts)[:-1]), case.batch.plan.group_size
    pieces = list[tuple[IntArray, list[IntArray]]]()
    if traces_whole:
        pieces.append((case.positions, slots))
    for slot in slots[:MAX_TRACED]:
        pieces.append((slot, np.split(slot, range(size, len(slot), size))))
    for positions, parts in pieces:
        with AllocationGuard():  # what does not fit is passed over
            ways = {"its micro-batch": [*map(case.load, parts)]}
            if len(parts) > 1:
                found = find_modules(case, case.load(positions), ways)
                if culprits := [*found.modules, *found.sums]:
                    return culprits
    name, error = errors.worst[0]
    reason = Reason(
        f"the gradient of {name} depends on the micro-batches (error {error:.0e}), while all "
        "module outputs and loss sums agree: look for a custom backward, a hook on gradients, or "
        "state outside of buffers"
    )
    return [(name.rpartition(".")[0] or name, reason)]


def check_recomputed(
    case: Case, errors: Errors, rest: Errors
) -> tuple[Errors, Errors, NamedReasons]:
    """Compare gradients and buffers, in the same cut; where they differ, name modules.

    Errors so found, of gradients or buffers, take the place of those that are given.
    """
    if not recomputes(case.module):
        return errors, rest, []
    found, named = compare_recomputed(case, case.batch.micro_batches)
    return (found, found, named) if named else (errors, rest, [])


def compare_recomputed(
    case: Case,
    micro_batches: Sequence[MicroBatch],
    change: Callable[[nn.Module], object] | None = None,
) -> tuple[Errors, NamedReasons]:
    """Compare a model as `change` leaves it with one that recomputes nothing; name what differs."""

    def compute(how: Callable[[nn.Module], object] | None) -> Gradient:
        return replace(case, change=how).gradient(micro_batches, with_buffers=True)

    plain = compute(recompute_nothing)
    found = _errors(case, compute(change), plain)
    # What differs from run to run, such as ungoverned draws, is not due to recomputation.
    if found.is_exact or not _errors(case, compute(recompute_nothing), plain).is_exact:
        return found, []
    wrong = {name for name, error in found.by_name.items() if error > found.limit}
    names = [*filter(wrong.__contains__, dict(case.module.named_buffers()))]
    if not names:
        # The last module with another gradient: backward begins there.
        names = [*filter(wrong.__contains__, dict(case.module.named_parameters()))][-1:]
    owners = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
    return found, [(owner, RUNS_AGAIN) for owner in owners]


def _errors(case: Case, found: Gradient, plain: Gradient) -> Errors:
    # Equal bits are left out: between two infinities, as in a mask, there is no difference.
    ours, theirs = dict(found), dict(plain)
    for name in found.keys() & plain.keys():
        if torch.equal(bits_of(found[name]), bits_of(plain[name])):
            del ours[name], theirs[name]
    return case.errors(ours, theirs)
