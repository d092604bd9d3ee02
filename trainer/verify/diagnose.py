"""Why a step is not exact: puts one suspect after another right, and compares what remains.

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
from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard
from trainer.training.kit import Kit
from trainer.verify.comparison import EXACT, MARGIN, Case, Errors
from trainer.verify.copies import Gradient, Scratch
from trainer.verify.find_module import (
    UNREPEATABLE,
    Culprits,
    Draws,
    Found,
    Way,
    described,
    find,
    pick,
    silence,
)
from trainer.verify.hooks import SHARED, UNCARRIED, drop_hooks, hooked
from trainer.verify.rounding import Rounding
from trainer.verify.trace import OUTSIDE

DRAWS = "draws at random anew for every micro-batch"

LOUD = (
    f"{DRAWS}, in evaluation mode too: equal in distribution only, and whether the step is exact "
    "but for that cannot be told; draw where `self.training` is true alone"
)

AMPLIFIED = "no cut is to blame and none can be cleared"

UNPROVEN = (DRAWS, UNREPEATABLE, UNCARRIED, SHARED, AMPLIFIED)
"""Words of the reasons by which a step is neither exact nor known to depend on its cut."""

LOW = (torch.bfloat16, torch.float16)
"""Precisions in which adding up micro-batches loses bits."""

NEIGHBOURS_OR_PADDING = "its micro-batch"

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
        is_modular: whether only modules are among them, so that one micro-batch per step would
            be exact.
        is_exact_without: whether the step is exact with all that draws at random switched off.
    """

    culprits: Culprits
    is_modular: bool
    is_exact_without: bool = False


def low_precision(kit: Kit) -> torch.dtype | None:
    """Give the dtype of parameters that accumulate in fewer bits than fp32."""
    dtypes = {p.dtype for p in kit.model.module.parameters() if p.requires_grad}
    return next((dtype for dtype in LOW if dtype in dtypes), None)


def suspects(
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
        return Blame(culprits, is_modular=False)
    whole, ways = pick(case.groups)
    draws = silence(case.scratch, whole)
    if draws:
        expected = case.expected()
        errors = case.errors(case.planned(_kind(kit)), expected)
        culprits += _drawing(case.scratch, draws, errors)
        if errors.is_exact:
            is_modular = not _has_settings(kit)
            return Blame(culprits, is_modular, is_exact_without=is_modular and not draws.loud)
    found_hooks, errors, expected = _hooks(case, kit, errors, expected)
    culprits += found_hooks
    if errors.is_exact:
        return Blame(culprits, is_modular=not _has_settings(kit))
    amplified = _amplified(case, errors)
    if amplified:
        return Blame([*culprits, *amplified], is_modular=False)
    found, strategy = _located(case, kit, expected, (whole, ways), draws, traces_whole=traces_whole)
    named = [*found.all, *strategy]
    if not named and not draws.loud:
        named = [_unexplained(errors)]
    is_modular = named == [*found.auxiliary, *found.modules] and not _has_settings(kit)
    culprits = [*found.auxiliary, *culprits]
    return Blame([*culprits, *(c for c in named if c not in culprits)], is_modular)


def proves_nothing(culprits: Culprits) -> bool:
    """Tell whether no reason among them is one by which the step depends on its cut."""
    return all(any(words in reason for words in UNPROVEN) for _, reason in culprits)


def _located(
    case: Case,
    kit: Kit,
    expected: Gradient,
    picked: tuple[MicroBatch, list[Way]],
    draws: Draws,
    *,
    traces_whole: bool,
) -> tuple[Found, Culprits]:
    """Search a few samples, then the step itself, then both with weights a little elsewhere."""
    packed = case.batch.plan.packed
    found = find(case.scratch, *picked, packed=packed, excused=draws.loud)
    strategy = [] if found else _strategy(case, kit, expected)
    if not (found or strategy or draws.loud):
        found = _search_step(case, traces_whole=traces_whole)
    if not (found or strategy or draws.loud):
        _nudge(case.scratch.module)
        found = find(case.scratch, *picked, packed=packed)
        found = found or _search_step(case, traces_whole=traces_whole)
    return found, strategy


def _has_settings(kit: Kit) -> bool:
    return kit.normalizer == "micro_batches" or low_precision(kit) is not None


def _kind(kit: Kit) -> Kind:
    return "tokens" if kit.normalizer == "micro_batches" else kit.normalizer


def _settings(
    case: Case, kit: Kit, planned: Gradient, expected: Gradient
) -> tuple[Culprits, Errors]:
    """Charge what was asked for, and tell how far the step is from exact without it."""
    errors = case.errors(planned, expected)
    culprits: Culprits = []
    if low_precision(kit) is not None:
        culprits.append(_precision(case, kit, expected, errors))
    if kit.normalizer == "micro_batches" and not errors.is_exact:
        errors = case.errors(case.planned(_kind(kit)), expected)
        reason = "a mean of means: a token's share depends on its micro-batch; use tokens"
        culprits.append(("batch.normalizer=micro_batches", reason))
    return culprits, errors


def _precision(case: Case, kit: Kit, expected: Gradient, errors: Errors) -> tuple[str, str]:
    """Tell what low-precision weights cost, and what of it is due to the cut."""
    low = short(low_precision(kit))
    measured = ""
    if errors.is_exact:
        as_is = replace(case, scratch=Scratch.of(kit, None))
        split, single = (
            case.errors(gradient, expected).largest
            for gradient in (as_is.planned(), as_is.expected())
        )
        measured = (
            f" (off by {split:.0e}; {case.reference}, in {low} too: {single:.0e}; the plan in "
            f"{short(case.scratch.dtype)}: {errors.largest:.0e})"
        )
    reason = (
        f"{low} weights: their gradients lose bits as micro-batches accumulate{measured}; keep "
        "fp32 weights and use precision=bf16"
    )
    return "parameters", reason


def _drawing(scratch: Scratch, draws: Draws, errors: Errors) -> Culprits:
    outcome = (
        f"exact with it off (error {errors.largest:.0e}); set its rate to 0, or accept it"
        if errors.is_exact
        else f"not exact with it off either (error {errors.largest:.0e})"
    )
    quiet = f"{DRAWS}, equal in distribution only: the step is {outcome}"
    reasons = dict.fromkeys(draws.quiet, quiet) | dict.fromkeys(draws.loud, LOUD)
    outside = reasons.pop(OUTSIDE, None)
    culprits = described(dict(scratch.module.named_modules()), reasons)
    if outside is not None:
        culprits.append((f"objective {type(scratch.kit.objective).__name__}", outside))
    return culprits


def _hooks(
    case: Case, kit: Kit, errors: Errors, expected: Gradient
) -> tuple[Culprits, Errors, Gradient]:
    """Take the hooks off all gradients, and charge those without which less is wrong.

    Returns:
        Them, the errors that are left, and the reference without hooks.
    """
    hooks = hooked(case.scratch.module)
    if not hooks:
        return [], errors, expected
    drop_hooks(case.scratch.module)
    expected = case.expected()
    left = case.errors(case.planned(_kind(kit)), expected)
    mended = {n for n in errors.by_name if _is_wrong(errors, n) and not _is_wrong(left, n)}
    # A hook may also move the gradients of others.
    charged = (hooks.keys() & mended or hooks.keys()) if mended else set[str]()
    culprits = [(name, hook_reason(hooks[name])) for name in sorted(charged)]
    return culprits, left, expected


def _is_wrong(errors: Errors, name: str) -> bool:
    return name in errors.by_name and errors.by_name[name] > errors.limits[name]


def hook_reason(method: str) -> str:
    """Say why a hook on a gradient makes a step depend on its cut."""
    return (
        f"a hook on its gradient ({method}) runs for every micro-batch, and not once for the "
        "step's: do it once a step, in the optimizer's step, or let it only scale by a constant"
    )


def _amplified(case: Case, errors: Errors) -> Culprits:
    """Tell whether rounding alone moves the gradient as far as the cut does.

    An error that has lost more than half of the digits of the limit is not asked.
    """
    dtype = case.scratch.dtype or torch.float32
    if errors.largest > math.sqrt(EXACT[dtype]):
        return []
    rounding = Rounding(case.scratch.module, case.planned)
    noise = rounding.spread(torch.finfo(dtype).eps)
    wrong = [name for name, error in errors.by_name.items() if error > errors.limits[name]]
    blurs = {n: noise.get(n, 0.0) / (errors.sizes.get(n) or math.inf) for n in wrong}
    is_rounding = all(errors.by_name[n] <= MARGIN * blur for n, blur in blurs.items())
    if not is_rounding or any(rounding.spread(0.0).values()):
        return []
    reason = (
        f"the model amplifies it: weights moved by their last bit move the gradient by up to "
        f"{max(blurs.values()):.0e} too, so that {AMPLIFIED}; look "
        "for large numbers that cancel"
    )
    return [("rounding", reason)]


def _strategy(case: Case, kit: Kit, expected: Gradient) -> Culprits:
    """Tell whether the pieces are right and putting them together is wrong."""
    if isinstance(kit.strategy, Sum) or kit.objective.scope not in Sum.scopes:
        return []
    if not case.errors(case.planned(_kind(kit), Sum()), expected).is_exact:
        return []
    name = type(kit.strategy).__name__
    reason = f"{name} makes of the pieces' gradients another one than their sum, which is exact"
    return [("accum.gradient", reason)]


def _search_step(case: Case, *, traces_whole: bool) -> Found:
    """Take the planned micro-batches themselves apart: a few samples may be too few."""
    groups, packed = case.groups, case.batch.plan.packed
    planned = [m for m in case.batch.micro_batches if m.ids]
    found = Found()
    with AllocationGuard():
        if traces_whole and len(planned) > 1:
            way = Way(planned, NEIGHBOURS_OR_PADDING)
            found = find(case.scratch, groups.group(groups.positions), [way], packed=packed)
    start, unit = 0, case.batch.plan.group_size
    for micro_batch in planned[:MAX_TRACED]:
        positions = groups.positions[start : start + len(micro_batch.ids)]
        start += len(positions)
        if not found and len(positions) > unit:
            with AllocationGuard():
                starts = range(0, len(positions), unit)
                alone = [groups.group(positions[i : i + unit]) for i in starts]
                way = Way(alone, NEIGHBOURS_OR_PADDING)
                found = find(case.scratch, micro_batch, [way], packed=packed)
    return found


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


def short(dtype: torch.dtype | None) -> str:
    """Write a type without its module: `float64`."""
    return str(dtype).removeprefix("torch.")
