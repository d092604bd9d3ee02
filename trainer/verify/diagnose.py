"""Find why a step is not exact: put one suspect after another right, and compare what remains.

So every culprit is named, and none for another's fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from trainer.accumulate.normalizer import Kind
from trainer.accumulate.sum import Sum
from trainer.core.out_of_memory import AllocationGuard
from trainer.training.kit import Kit
from trainer.verify.comparison import EXACT, MARGIN, Case, Errors
from trainer.verify.copies import Gradient, Scratch
from trainer.verify.find_module import (
    EITHER,
    UNREPEATABLE,
    Culprits,
    Draws,
    Way,
    describe,
    find,
    pick,
    silence,
)
from trainer.verify.rounding import Rounding
from trainer.verify.trace import OUTSIDE

DRAWS = "draws at random anew for every micro-batch"

LOUD = (
    f"{DRAWS}, in evaluation mode too: equal in distribution only, and whether the step is exact "
    "but for that cannot be told; draw where `self.training` is true alone"
)

HOOKED = (
    "runs for every micro-batch and is not copied with the model, so nothing is proven: do what it "
    "does once a step, in the optimizer's step, or take it off"
)

SHARED = (
    "got a gradient from the copy that this compares, through a function or a scripted module that "
    "cannot be copied with the model, so nothing is proven: write it as a method of the module"
)

AMPLIFIED = "no cut is to blame and none can be cleared"

UNPROVEN = (DRAWS, UNREPEATABLE, HOOKED, SHARED, AMPLIFIED)
"""Words of the reasons by which a step is neither exact nor known to depend on its cut."""

LOW = (torch.bfloat16, torch.float16)
"""Precisions in which adding up micro-batches loses bits."""

NUDGE = 0.01
"""Deviation of what is added to weights; a residual's gate at zero then lets through as much."""

MAX_TRACED = 8
"""Planned micro-batches that are taken apart when the whole batch cannot be traced."""


@final
@dataclass(frozen=True, slots=True)
class Blame:
    """What was found.

    Attributes:
        culprits: never empty, what the model adds to its loss first.
        is_exact_without: whether the step is exact with all that draws at random switched off.
    """

    culprits: Culprits
    is_exact_without: bool = False


def proves_nothing(culprits: Culprits) -> bool:
    """Tell whether no reason among them is one by which the step depends on its cut."""
    return all(any(words in reason for words in UNPROVEN) for _, reason in culprits)


def low_precision(kit: Kit) -> torch.dtype | None:
    """Give the dtype of parameters that accumulate in fewer bits than fp32."""
    dtypes = {p.dtype for p in kit.model.module.parameters() if p.requires_grad}
    return next((dtype for dtype in LOW if dtype in dtypes), None)


def short(dtype: torch.dtype | None) -> str:
    """Write a type without its module: `float64`."""
    return str(dtype).removeprefix("torch.")


def diagnose(
    case: Case, kit: Kit, planned: Gradient, expected: Gradient, *, traces_whole: bool
) -> Blame:
    """Name the culprits of a step that is not exact.

    Args:
        case: its scratch copy is used up: what draws at random is switched off in it.
        kit: the run's.
        planned: the step's gradient in the case's precision.
        expected: the reference.
        traces_whole: whether what every module gives for the whole batch fits into memory.
    """
    culprits, errors = _settings(case, kit, planned, expected)
    if errors.is_exact:
        return Blame(culprits)
    draws = silence(case.scratch, pick(case.groups)[0])
    if draws:
        expected = case.expected()
        errors = case.errors(case.planned(_kind(kit)), expected)
        is_exact_without = errors.is_exact and not culprits and not draws.loud
        culprits += _drawing(case.scratch, draws, errors)
        if errors.is_exact:
            return Blame(culprits, is_exact_without)
    amplified = _amplified(case, errors)
    if amplified:
        return Blame([*culprits, *amplified])
    added, named = _located(case, kit, expected, draws, traces_whole=traces_whole)
    if not (added or named or draws.loud):
        named = [_unexplained(errors)]
    culprits = [*added, *culprits]
    return Blame([*culprits, *(c for c in named if c not in culprits)])


def _located(
    case: Case, kit: Kit, expected: Gradient, draws: Draws, *, traces_whole: bool
) -> tuple[Culprits, Culprits]:
    """Search a few samples, then the step itself, then both with weights a little elsewhere.

    Returns:
        What the model adds to its loss, and everything else.
    """
    (whole, ways), packed = pick(case.groups), case.batch.plan.packed
    found = find(case.scratch, whole, ways, packed=packed, excused=draws.loud)
    if found.all or draws.loud:
        return found.added, [*found.modules, *found.sums, *found.data]
    if (
        not isinstance(kit.strategy, Sum)
        and kit.objective.scope in Sum.scopes
        and case.errors(case.planned(_kind(kit), Sum()), expected).is_exact
    ):
        name = type(kit.strategy).__name__
        reason = f"{name} makes of the pieces' gradients another one than their sum, which is exact"
        return [], [("accum.gradient", reason)]
    culprits = _search_step(case, traces_whole=traces_whole)
    if not culprits:
        _nudge(case.scratch.module)
        culprits = find(case.scratch, whole, ways, packed=packed).all
    return [], culprits or _search_step(case, traces_whole=traces_whole)


def _kind(kit: Kit) -> Kind:
    return "tokens" if kit.normalizer == "micro_batches" else kit.normalizer


def _settings(
    case: Case, kit: Kit, planned: Gradient, expected: Gradient
) -> tuple[Culprits, Errors]:
    """Charge what was asked for, and tell how far the step is from exact without it."""
    errors = case.errors(planned, expected)
    culprits: Culprits = []
    if low_precision(kit) is not None:
        culprits.append(("parameters", _precision(case, kit, expected, errors)))
    if kit.normalizer == "micro_batches" and not errors.is_exact:
        errors = case.errors(case.planned(_kind(kit)), expected)
        reason = "a mean of means: a token's share depends on its micro-batch; use tokens"
        culprits.append(("batch.normalizer=micro_batches", reason))
    return culprits, errors


def _precision(case: Case, kit: Kit, expected: Gradient, errors: Errors) -> str:
    """Tell what low-precision weights cost, and what of it is due to the cut."""
    low, measured = short(low_precision(kit)), ""
    if errors.is_exact:
        as_is = replace(case, scratch=Scratch.of(kit, None))
        split = case.errors(as_is.planned(), expected).largest
        single = case.errors(as_is.expected(), expected).largest
        measured = (
            f" (off by {split:.0e}; {case.reference}, in {low} too: {single:.0e}; the plan in "
            f"{short(case.scratch.dtype)}: {errors.largest:.0e})"
        )
    return (
        f"{low} weights: their gradients lose bits as micro-batches accumulate{measured}; keep "
        "fp32 weights and use precision=bf16"
    )


def _drawing(scratch: Scratch, draws: Draws, errors: Errors) -> Culprits:
    outcome = (
        f"exact with it off (error {errors.largest:.0e}); set its rate to 0, or accept it"
        if errors.is_exact
        else f"not exact with it off either (error {errors.largest:.0e})"
    )
    quiet = f"{DRAWS}, equal in distribution only: the step is {outcome}"
    reasons = dict.fromkeys(draws.quiet, quiet) | dict.fromkeys(draws.loud, LOUD)
    outside = reasons.pop(OUTSIDE, None)
    culprits = describe(dict(scratch.module.named_modules()), reasons)
    if outside is not None:
        culprits.append((f"objective {type(scratch.kit.objective).__name__}", outside))
    return culprits


def _amplified(case: Case, errors: Errors) -> Culprits:
    """Tell whether rounding alone moves the gradient as far as the cut does.

    An error that has lost more than half of the digits of the limit is not asked.
    """
    dtype = case.scratch.dtype or torch.float32
    if errors.largest > math.sqrt(EXACT[dtype]):
        return []
    rounding = Rounding(case.scratch.module, case.planned)
    noise = rounding.measure(torch.finfo(dtype).eps)
    wrong = [name for name, error in errors.by_name.items() if error > errors.limits[name]]
    blurs = {n: noise.get(n, 0.0) / (errors.sizes.get(n) or math.inf) for n in wrong}
    is_rounding = all(errors.by_name[n] <= MARGIN * blur for n, blur in blurs.items())
    # Weights that are not moved at all show whether something else differs each time.
    if not is_rounding or any(rounding.measure(0.0).values()):
        return []
    reason = (
        f"the model amplifies it: weights moved by their last bit move the gradient by up to "
        f"{max(blurs.values()):.0e} too, so that {AMPLIFIED}; look for large numbers that cancel"
    )
    return [("rounding", reason)]


def _search_step(case: Case, *, traces_whole: bool) -> Culprits:
    """Take the planned micro-batches themselves apart: a few samples may be too few."""
    groups, packed = case.groups, case.batch.plan.packed
    planned = [m for m in case.batch.micro_batches if m.ids]
    culprits: Culprits = []
    with AllocationGuard():
        if traces_whole and len(planned) > 1:
            way = Way(planned, EITHER)
            culprits = find(case.scratch, groups.group(groups.positions), [way], packed=packed).all
    start, unit = 0, case.batch.plan.group_size
    for micro_batch in planned[:MAX_TRACED]:
        positions = groups.positions[start : start + len(micro_batch.ids)]
        start += len(positions)
        if not culprits and len(positions) > unit:
            with AllocationGuard():
                starts = range(0, len(positions), unit)
                way = Way([groups.group(positions[i : i + unit]) for i in starts], EITHER)
                culprits = find(case.scratch, micro_batch, [way], packed=packed).all
    return culprits


def _nudge(module: nn.Module) -> None:
    """Move every weight a little, so that nothing hides behind a gate that begins at zero."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                weight.add_(NUDGE * torch.randn(weight.shape, generator=draw).to(weight))


def _unexplained(errors: Errors) -> tuple[str, str]:
    """Say the finest that is true when no module's result, loss sum or weight differs."""
    name, error = errors.worst[0]
    owner = name.rpartition(".")[0] or name
    reason = (
        f"the gradient of {name} depends on the cut (error {error:.0e}), while what every module "
        "gives and every loss sum agree: look for a backward of its own, a hook on gradients, or "
        "state kept outside of buffers"
    )
    return owner, reason
