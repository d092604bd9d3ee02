"""Run the user's own objective and optimizer once, for what shows only then, before training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from trainer.build.parts import Parts
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields, to_device
from trainer.data.loader import Request
from trainer.objectives.base import IGNORED, Objective, sums_of, weights_of
from trainer.objectives.model_loss import REDUCTIONS, ModelLoss
from trainer.plan.cut import IntArray
from trainer.tune.restored import restoring
from trainer.tune.workload import Workload
from trainer.verify.hooks import hooked

TOLERANCE = 0.02
"""Relative; sums in bf16 over different shapes differ by less, a mean by a half."""

ROUNDING = 1e-4
"""Relative; sums in float32 over different shapes differ by less."""


def rehearse_own(parts: Parts, work: Workload) -> Iterator[str]:
    """Run the classes of the user's own that decide whether a step can be cut at all.

    Not collective; the declared state of the model, whole and on its device, is put back.

    Args:
        parts: before the model is laid out over ranks.
        work: around the same model.

    Yields:
        One line for each thing a user should know.

    Raises:
        ConfigError: the optimizer steps within backward, the objective does not weigh what it
            sums, or the loss that the model computes is no sum over samples.
    """
    if any(p.is_meta for p in parts.module.parameters()):
        return
    for name, method in list(hooked(parts.module).items())[:1]:
        yield (
            f"{name} has a hook on its gradient ({method}), which runs for every micro-batch, not "
            "once a step: what does more than scale by a constant, an optimizer's step above all, "
            "makes the step depend on its cut; train verify proves nothing with it"
        )
    kind = getattr(parts.spec, "kind", type(parts.spec))
    if kind.__module__.partition(".")[0] not in {"trainer", "torch"}:
        _refuse_steps_in_backward(work, parts.config.optimizer.target)
    objective, is_verified = parts.objective, parts.config.command == "verify"
    # What fails on so few samples fails again, and is told, where it is really needed.
    with suppress(RuntimeError, ValueError, IndexError):
        if isinstance(objective, ModelLoss) and not is_verified:
            _refuse_model_loss(parts, objective)
            yield from _coupling(parts, objective)
            yield from _added(parts, objective)
        if type(objective).__module__.partition(".")[0] != "trainer":
            yield from _coupling(parts, objective)


def _coupling(parts: Parts, objective: Objective) -> Iterator[str]:
    """Compare sums and weights of two groups of samples together with those of each alone.

    Yields:
        A line for a loss, and one for a weight, that is no sum over samples, and for a metric that
        is not declared.
    """
    name, groups = type(objective).__name__, "samples" if objective.group_size == 1 else "groups"
    tolerance = ROUNDING if parts.config.precision == "fp32" else TOLERANCE
    close = partial(math.isclose, rel_tol=tolerance, abs_tol=1e-6)
    for kind, term, whole, apart, padded in _together_and_apart(parts, objective):
        if kind == "metric" and term not in objective.metric_names:
            yield (
                f"objective: {name} gives {term} as a metric, but does not declare it, so that a "
                f"step in which only {term} has a weight counts as one with a loss: add {term!r} "
                f"to metric_names of {name}"
            )
        elif kind != "metric" and not close(whole, apart):
            remedy = "sum over samples and divide by nothing"
            if close(whole, padded):
                remedy = "padding changes it: mask it, or use samples of one length"
            elif isinstance(objective, ModelLoss):
                remedy = "the model adds something to its loss that is no sum over samples"
            yield (
                f"objective: {kind} {term} of {name} is {whole:.6g} for two {groups} together and "
                f"{apart:.6g} for both apart, so the step depends on the cut: {remedy}; train "
                "verify tells how far it is off"
            )


def _refuse_model_loss(parts: Parts, objective: ModelLoss) -> None:
    """Refuse settings under which the loss that the model computes is no sum over samples.

    Raises:
        ConfigError: naming those under which it is.
    """

    def error(objective: ModelLoss) -> float:
        found = _together_and_apart(parts, objective)
        # A head's mean over a sample without a label is NaN; a loss that always is says nothing.
        errors = [
            math.inf if math.isnan(apart) else abs(whole - apart) / (abs(apart) or 1.0)
            for *_, whole, _, apart in found
            if not math.isnan(whole)
        ]
        return max(errors, default=0.0)

    causal = _shifts(parts, objective)
    is_other = objective.reduction == "mean" and causal != objective.causal
    if error(objective) <= TOLERANCE and not is_other:
        return
    # Samples may be too alike to tell two apart; then the fewest keys are to be typed.
    reductions = sorted(REDUCTIONS, key=lambda reduction: reduction != objective.reduction)
    others = [ModelLoss(reduction=reduction, causal=causal) for reduction in reductions]
    best = min(others, key=lambda other: max(error(other), ROUNDING))
    typed = [f"objective.reduction={best.reduction}"] * (best.reduction != objective.reduction)
    typed += [f"objective.causal={str(causal).lower()}"] * (causal != objective.causal)
    remedy = f"type {' '.join(typed)}, or " if error(best) <= TOLERANCE else ""
    loss = "drops num_items_in_batch" if objective.reduction == "sum" else "takes another mean"
    raise ConfigError(
        f"objective.reduction={objective.reduction}: {type(parts.module).__name__} {loss}: its "
        "loss for two samples together is not that of both apart, so the step depends on the cut: "
        f"{remedy}take an objective that sums, such as next_token or classify"
    )


def _shifts(parts: Parts, objective: ModelLoss) -> bool:
    """Find whether the model leaves out the first label of each row; as stated where none shows.

    Two samples may be too alike to tell a mean over one count from one over another.
    """
    fields = _load(parts, _two_groups(parts, 1)[0])
    labels = fields.get("labels")
    if labels is None or labels.dim() == 1 or labels.is_floating_point():
        return objective.causal
    nothing = torch.full_like(labels, IGNORED)
    first = torch.cat([labels[:, :1], nothing[:, 1:]], 1)
    if torch.equal(first, nothing):
        return objective.causal
    asked = replace(objective, causal=False)
    try:
        one, none = (_loss(parts, asked, {**fields, "labels": each}) for each in (first, nothing))
    except (RuntimeError, ValueError, IndexError):  # it takes no labels like these
        return objective.causal
    return one == none or not math.isfinite(one)


def _added(parts: Parts, objective: ModelLoss) -> Iterator[str]:
    """Look for what a model adds to its loss beside the sum over labels, as routers do.

    Yields:
        A line where it does.
    """
    fields = _load(parts, _two_groups(parts, 1)[0])
    if objective.reduction == "sum" and "labels" in fields:
        nothing = torch.full_like(fields["labels"], IGNORED)
        added = _loss(parts, objective, {**fields, "labels": nothing})
        if math.isfinite(added) and added:
            yield (
                f"objective: {type(parts.module).__name__} adds {added:.4g} to its loss where no "
                "label is, as routers do: once for every micro-batch, so the step depends on the "
                "cut; switch it off (output_router_logits=False); train verify tells how far it is "
                "off"
            )


def _loss(parts: Parts, objective: ModelLoss, fields: Fields) -> float:
    with restoring(parts.module, objective), torch.no_grad():
        parts.module.eval()
        sums = sums_of(objective, parts.call, to_device(fields, parts.world.device), None)
    return float(sums.losses["model_loss"])


def _two_groups(parts: Parts, size: int) -> list[IntArray]:
    """Name two groups of the first step, together and apart; of samples, shortest and longest."""
    order = parts.source.order
    ids = order.next(order.start).ids
    if size == 1 < len(ids):
        lengths = parts.source.lengths[ids]
        ids = ids[[lengths.argmin(), len(ids) - 1 - lengths[::-1].argmax()]]
    return [ids[: 2 * size], ids[:size], ids[size : 2 * size]]


def _together_and_apart(
    parts: Parts, objective: Objective
) -> Iterator[tuple[str, str, float, float, float]]:
    """Run two groups of samples of the first step.

    Yields:
        Loss, weight or metric, its name, and its value for both groups together, apart, and apart
        but padded as they are together.
    """
    groups = _two_groups(parts, objective.group_size)
    if objective.scope != "sample" or len(groups[0]) < 2 * objective.group_size:
        groups = groups[1:2]
    longest = int(parts.source.lengths[groups[0]].max())
    with restoring(parts.module, objective), torch.no_grad():
        parts.module.eval()
        together, *apart = [_sums(parts, objective, group) for group in groups]
        padded = [_sums(parts, objective, group, longest) for group in groups[1:]]
    for kind, term in together if apart else ():
        both, even = (sum(e.get((kind, term), 0.0) for e in each) for each in (apart, padded))
        yield kind, term, together[kind, term], both, even


def _load(parts: Parts, ids: IntArray, pad_to: int | None = None) -> Fields:
    lengths = parts.source.lengths[ids]
    length = int(lengths.sum()) if parts.layout.packed else pad_to or int(lengths.max())
    request = Request(ids=tuple(ids.tolist()), epoch=0, pad_to=length, packed=parts.layout.packed)
    return parts.source.loader.load(request)


def _sums(
    parts: Parts, objective: Objective, ids: IntArray, pad_to: int | None = None
) -> dict[tuple[str, str], float]:
    fields = _load(parts, ids, pad_to)
    weights = weights_of(objective, fields)
    found = sums_of(objective, parts.call, to_device(fields, parts.world.device), weights)
    sums = {("loss", name): float(loss) for name, loss in found.losses.items()}
    sums |= {("metric", name): float(metric) for name, metric in found.metrics.items()}
    return sums | {("weight", name): weights[name] for name in found.losses}


def _refuse_steps_in_backward(work: Workload, target: str | None) -> None:
    """Build the optimizer over fakes of the parameters, and look for hooks it leaves on them.

    Raises:
        ConfigError: there are some.
    """
    from trainer.tune.fake import CannotRunFake, fake_copy  # noqa: PLC0415 - half a second

    found: list[str] = []
    # One that needs values cannot be looked at.
    with suppress(CannotRunFake), fake_copy(work) as (_, theirs, _):
        theirs.make_optimizer(theirs.model)
        found.extend(hooked(theirs.model))
    if found:
        raise ConfigError(
            f"optimizer._target_={target}: steps within backward (a hook on "
            f"{found[0]}), so every micro-batch would be a step of its own; use one that waits "
            "for step()"
        )
