"""Check, before training, what a run is made of.

That no part makes the step inexact, and that a loss nobody has tested is a sum.
"""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise

import torch

from trainer.accumulate.two_pass import too_few
from trainer.assemble.components import Components
from trainer.assemble.reads import check_reads
from trainer.assemble.stages import check_stages
from trainer.core.errors import ConfigError
from trainer.core.format import plural
from trainer.core.micro_batch import to_device
from trainer.core.stateful import Stateful
from trainer.data.loader import Request
from trainer.models.first_weights import is_on_meta
from trainer.objectives.base import Objective, sums_of, weights_of
from trainer.objectives.coupled import CoupledObjective
from trainer.plan.cut import IntArray
from trainer.tune.workload import restoring

# Relative; sums over different shapes differ by less, and a mean by a half
ROUNDING = {"fp32": 1e-4, "tf32": 0.005, "bf16": 0.02, "fp16": 0.005}
# Relative error from which on a loss is no sum, rather than one with a little beside it
LARGE = 0.02
# How many times smaller the error is under the settings that are meant
CLEARLY_BETTER = 10.0


def check_parts(components: Components) -> None:
    """Refuse what no cut can make exact, and a schedule that does not fit into the run."""
    components.schedule.factor(components.total_steps - 1, components.total_steps)
    check_stages(components)
    for feature in components.features:
        feature.check(components)
    config = components.config
    coupling, strategy, cut = components.coupling, components.strategy, components.cut
    objective, module = components.objective, components.module
    kind = objective.coupling.kind
    for each, part in ((objective.coupling, objective), (coupling, module)):
        # What a micro-batch's own samples share is the same under every strategy.
        if each.kind not in {*strategy.couplings, "micro_batch"}:
            text = _unfit(part, each.kind)
            raise ConfigError(f"accum.gradient: {type(strategy).__name__} {text}")
    if components.parallel.sync.overlaps and strategy.before and components.world.size > 1:
        # Ranks that fail, and that do not, in an earlier pass would send in another order.
        raise ConfigError(
            f"sync={components.parallel.sync.name}: sends gradients during a backward, and "
            f"{type(strategy).__name__} has several passes: type sync=deferred"
        )
    if kind == "batch" and config.batch.normalizer == "micro_batches":
        text = "a loss over the whole batch has no means of micro-batches"
        raise ConfigError(f"batch.normalizer=micro_batches: {text}: type batch.normalizer=tokens")
    _check_groups(components)
    _check_samples(components)
    if cut.hard_cap is not None:  # refuses the longest of all samples now, and not in its step
        cut.cut(components.source.lengths[[components.source.lengths.argmax()]], components.layout)
    if coupling.kind not in cut.couplings:
        raise ConfigError(
            f"{coupling.key or 'accum'}: {coupling.why}, and "
            f"accum={config.accum.name or config.accum.target} chooses its size: type "
            f"accum=fixed accum.micro=N{coupling.accepts} "
            f"(N={components.source.order.sizes.largest} is the whole step at once)"
            f"{coupling.remedy and f', or {coupling.remedy}'}"
        )


def _unfit(part: object, kind: str) -> str:
    """Say why a strategy is wrong for an objective or a model, and what to type."""
    name = type(part).__name__
    if isinstance(part, CoupledObjective):
        return f"is wrong for {name}, whose coupling is {kind}: type accum.gradient=auto"
    remedy = f"use a strategy that lists {kind} in its `couplings`"
    if isinstance(part, Objective) and kind == "batch":
        return (
            f"is wrong for {name}, which couples all samples of a step: derive it from "
            f"CoupledObjective (docs/how-to/own/coupled-objective.md), or {remedy}"
        )
    return f"is wrong for {name}, whose coupling is {kind}: {remedy}"


def _check_groups(components: Components) -> None:
    """Refuse fixed micro-batches that would divide a group, and say what makes one."""
    coupling, size = components.coupling, components.coupling.size
    micro = components.config.accum.params.get("micro")
    if not components.cut.chooses_sizes and micro and micro % size and coupling.why:
        other = coupling.remedy.replace("=N", f"={micro}") if micro > 1 else ""
        raise ConfigError(
            f"accum.micro={micro}: {coupling.why}: type accum.micro={-(-micro // size) * size}"
            f"{other and f', or {other}'}"
        )


def _check_samples(components: Components) -> None:
    """Refuse steps with too few samples for an objective that compares them."""
    objective, order, config = components.objective, components.source.order, components.config
    if not isinstance(objective, CoupledObjective) or isinstance(order.sizes, Stateful):
        return
    size, least = order.size_of(order.start), objective.min_samples
    if config.batch.unit == "samples" and min(size, order.num_samples) < least:
        raise ConfigError(too_few(objective, f"batch.global={size}: a step of 1 sample"))
    # Of steps of one size all but the last of an epoch have as many samples.
    first = order.steps_per_epoch if order.sizes.is_constant else components.total_steps
    for begin, end in pairwise(order.walk(min(first, components.total_steps))):
        if (count := end.samples - begin.samples) < least:
            key = "batch.tail=keep" if order.keeps_tail else "batch"
            what = f"{key}: step {begin.step + 1} has {plural(count, 'sample')}"
            text = "type batch.tail=drop, or a larger batch.global or stage"
            raise ConfigError(f"{too_few(objective, what)}: {text}")


def try_out(components: Components) -> list[str]:
    """Run the objective and read samples twice; gives what to warn of."""
    with components.trial_values():
        found = check_sums(components)
    return [*found, *check_reads(components)]


def check_sums(components: Components) -> list[str]:
    """Compare the loss of two samples of the first step together with that of both apart.

    Only where the objective does not declare that it adds samples up. Not collective; the declared
    state of the model is put back. Gives a warning where they differ; `train verify` measures the
    same, and more.
    """
    objective, ids = (
        components.objective,
        components.source.order.next(components.source.order.start).ids,
    )
    is_coupled = objective.coupling.kind != "none"
    is_here = not is_on_meta(components.module) and components.config.command != "verify"
    if objective.sums_samples or is_coupled or not is_here:
        return []
    lengths = components.source.lengths[ids]
    pair = ids[[lengths.argmin(), len(ids) - 1 - lengths[::-1].argmax()]]
    # What fails on so few samples fails again, in full, in the step.
    with suppress(RuntimeError, ValueError, IndexError):
        limit, error = ROUNDING[components.precision], _error(components, objective, pair)
        if error <= limit or len(ids) == 1:
            return []
        padded = _error(components, objective, pair, is_padded=True)
        remedy = "mask the padding, or use samples of one length"
        if padded > limit:
            remedy = "sum over samples and divide by nothing"
            if objective.variants():
                _refuse(components, objective, pair, padded)
        return [
            f"objective: {type(objective).__name__} gives two samples in one micro-batch a loss "
            f"that differs by {error:.2g} from their separate losses, so the step depends on the "
            f"micro-batches: {remedy}; train verify measures by how much"
        ]
    return []


def _refuse(components: Components, objective: Objective, pair: IntArray, error: float) -> None:
    """Refuse a model's loss that is no sum, unless by little; name settings that make it one."""
    others = objective.variants()
    errors = [_error(components, other, pair, is_padded=True) for other in others]
    best, is_better = others[errors.index(min(errors))], min(errors) * CLEARLY_BETTER <= error
    if error <= LARGE and not is_better:
        return
    typed = [
        f"objective.{key}={str(value).lower()}"
        for key, value in vars(best).items()
        if value != vars(objective)[key]
    ]
    remedy = f"type {' '.join(typed)}, or " if is_better else ""
    key, value = next(iter(vars(objective).items()))
    raise ConfigError(
        f"objective.{key}={value}: the loss of {type(components.module).__name__} is not a sum "
        f"over samples, so the step depends on the micro-batches: {remedy}use an objective that "
        "sums, such as next_token or classify"
    )


def _error(
    components: Components, objective: Objective, pair: IntArray, *, is_padded: bool = False
) -> float:
    """Compute the relative difference between two samples together and apart.

    With `is_padded` each of the two is padded to the longer one, as it is where they are together,
    so that what is left is no effect of padding.
    """
    longest = int(components.source.lengths[pair].max()) if is_padded else 1
    with restoring(components.module, objective), torch.no_grad():
        components.module.eval()
        whole = _sum(components, objective, pair, longest)
        apart = sum(_sum(components, objective, ids, longest) for ids in (pair[:1], pair[1:]))
    error = abs(whole - apart) / (abs(apart) or 1.0)
    # A mean over a sample without a label is NaN; a loss that always is says nothing.
    return error if not math.isnan(error) else 0.0 if math.isnan(whole) else math.inf


def _sum(components: Components, objective: Objective, ids: IntArray, pad_to: int) -> float:
    lengths, packed = components.source.lengths[ids], components.layout.packed
    length = int(lengths.sum()) if packed else max(pad_to, int(lengths.max()))
    fields = components.source.loader.load(Request(tuple(ids.tolist()), 0, length, packed))
    weights = weights_of(objective, fields)
    found = sums_of(objective, components.call, to_device(fields, components.world.device), weights)
    return float(sum(map(float, found.losses.values())))
