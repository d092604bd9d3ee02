"""What shows only when the user's own objective and optimizer run, once, before training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from trainer.assemble import Parts
from trainer.culprits.hooks import hooked
from trainer.data.loader import Request
from trainer.errors import ConfigError
from trainer.micro_batch import to_device
from trainer.objectives.base import Objective, sums_of, weights_of
from trainer.objectives.model_loss import REDUCTIONS, ModelLoss
from trainer.tune.untouched import untouched
from trainer.tune.workload import Workload

TOLERANCE = 0.02
"""Relative; sums in bf16 over different shapes differ by less, a mean by a half."""

ROUNDING = 1e-4
"""Relative; differences below it do not rank settings."""


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
            "makes the step depend on its cut; train verify tells"
        )
    kind = getattr(parts.spec, "kind", type(parts.spec))
    if kind.__module__.partition(".")[0] not in {"trainer", "torch"}:
        _refuse_steps_in_backward(work, parts.config.optimizer.target)
    objective, is_verified = parts.objective, parts.config.command == "verify"
    # What fails on so few samples fails again, and is told, where it is really needed.
    with suppress(RuntimeError, ValueError, IndexError):
        if isinstance(objective, ModelLoss) and not is_verified:
            _refuse_model_loss(parts, objective)
        if type(objective).__module__.partition(".")[0] != "trainer":
            yield from _coupling(parts, objective)


def _coupling(parts: Parts, objective: Objective) -> Iterator[str]:
    """Compare sums and weights of two groups of samples together with those of each alone.

    Yields:
        A line for a loss, and one for a weight, that is no sum over samples, and for a metric that
        is not declared.
    """
    name, groups = type(objective).__name__, "samples" if objective.group_size == 1 else "groups"
    for kind, term, whole, apart in _together_and_apart(parts, objective):
        if kind == "metric" and term not in objective.metric_names:
            yield (
                f"objective: {name} gives {term} as a metric, but does not declare it, so that a "
                f"step in which only {term} has a weight counts as one with a loss: add {term!r} "
                f"to metric_names of {name}"
            )
        elif kind != "metric" and not math.isclose(whole, apart, rel_tol=TOLERANCE, abs_tol=1e-6):
            yield (
                f"objective: {kind} {term} of {name} is {whole:.4g} for two {groups} together and "
                f"{apart:.4g} for both apart, so the step depends on the cut: sum over samples and "
                "divide by nothing; train verify tells how far it is off"
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
            for *_, whole, apart in found
            if not math.isnan(whole)
        ]
        return max(errors, default=0.0)

    if error(objective) <= TOLERANCE:
        return
    others = [
        ModelLoss(reduction=reduction, causal=causal)
        for causal in (objective.causal, not objective.causal)
        for reduction in REDUCTIONS
    ]
    # Samples may be too alike to tell two apart; then the fewest keys are to be typed.
    best = min(others, key=lambda other: max(error(other), ROUNDING))
    typed = [f"objective.reduction={best.reduction}"] * (best.reduction != objective.reduction)
    typed += [f"objective.causal={str(best.causal).lower()}"] * (best.causal != objective.causal)
    remedy = f"type {' '.join(typed)}, or " if error(best) <= TOLERANCE else ""
    loss = "drops num_items_in_batch" if objective.reduction == "sum" else "takes another mean"
    raise ConfigError(
        f"objective.reduction={objective.reduction}: {type(parts.module).__name__} {loss}: its "
        "loss for two samples together is not that of both apart, so the step depends on the cut: "
        f"{remedy}take an objective that sums, such as next_token or classify"
    )


def _together_and_apart(
    parts: Parts, objective: Objective
) -> Iterator[tuple[str, str, float, float]]:
    """Run two groups of samples of the first step; of samples, the shortest and the longest.

    Yields:
        Loss, weight or metric, its name, and its value for both groups together and apart.
    """
    size, order = objective.group_size, parts.source.order
    ids = order.next(order.start).ids
    if size == 1 < len(ids):
        lengths = parts.source.lengths[ids]
        ids = ids[[lengths.argmin(), len(ids) - 1 - lengths[::-1].argmax()]]
    groups = [ids[: 2 * size], ids[:size], ids[size : 2 * size]]
    if objective.scope != "sample" or len(ids) < 2 * size:
        groups = groups[1:2]
    with untouched(parts.module, objective), torch.no_grad():
        parts.module.eval()
        found = [_sums(parts, objective, group.tolist()) for group in groups]
    if len(found) > 1:
        together, *apart = found
        for kind, term in together:
            both = sum(each.get((kind, term), 0.0) for each in apart)
            yield kind, term, together[kind, term], both


def _sums(parts: Parts, objective: Objective, ids: Sequence[int]) -> dict[tuple[str, str], float]:
    lengths = parts.source.lengths[list(ids)]
    length = int(lengths.sum() if parts.layout.packed else lengths.max())
    request = Request(ids=tuple(ids), epoch=0, pad_to=length, packed=parts.layout.packed)
    fields = parts.source.loader.load(request)
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
