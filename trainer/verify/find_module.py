"""Find what makes a step depend on its cut, by running samples together and apart."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, release_memory
from trainer.objectives.base import Sums
from trainer.objectives.model_loss import ModelLoss
from trainer.verify.case import Case
from trainer.verify.trace import OUTSIDE, Trace, compare, record, repeat, shares

Culprits = list[tuple[str, str]]
"""Names of modules, the objective, the data or a setting, each with the reason."""

# What a sample does not share when it is run in another micro-batch.
NEIGHBOURS, PADDING = "the rest of its micro-batch", "its padding"

# Relative differences of two sums that are rounding: in float64, in fewer bits, and of weights,
# which may be sums of the data's own float32 numbers.
TOLERANCE, SINGLE_TOLERANCE, WEIGHT_TOLERANCE = 1e-9, 1e-4, 1e-6

MAX_PICKED = 4  # samples that are run together and alone

UNREPEATABLE = (
    "gives another output each time: it draws from a generator that no seed of the run governs, or "
    "is not deterministic; draw from PyTorch's default generator"
)

STATEFUL = (
    "keeps state that every micro-batch updates and the next one reads: update it once per step, "
    "or not in training"
)

NORMALISES = (
    "normalises over the samples of its micro-batch: use GroupNorm or LayerNorm, or one "
    "micro-batch per step"
)

FIELD = (
    "the data give this field of a sample another value when its neighbours change: it is "
    "drawn or computed in `collate`, or padded on the left"
)

CAUSES = {
    NEIGHBOURS: ": capacity routing, or statistics or attention over the micro-batch: let it work "
    "on each sample alone (routing: without dropping), or use one micro-batch per step",
    PADDING: ": mask the padding, or use a layer that looks only backwards, or samples of one "
    "length",
}

REMEDY = "let `sums` add up over samples, and `weights` count what it adds up"
REMEDY_OF_MODEL = (
    "try objective.reduction=mean where the model drops num_items_in_batch, or the other value of "
    "objective.causal, or take an objective that sums, such as next_token or classify"
)

# Ways to part a micro-batch into smaller ones, in order, by what these do not share with it.
Ways = Mapping[str, Sequence[MicroBatch]]


class Found(NamedTuple):
    """What was found in a few samples.

    Attributes:
        modules: those that couple samples, heed padding, keep state or cannot be repeated; what
            the model adds to its loss; fields of the data that change with a sample's neighbours.
        sums: loss terms and weights of the objective that do not add up.
        quiet: modules that draw at random and stop in evaluation mode, which they are in now.
        loud: those that draw in evaluation mode, too; `OUTSIDE` is the objective.
        was_checked: whether two samples fit into memory, or all of this is empty.
    """

    modules: Culprits
    sums: Culprits
    quiet: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()
    was_checked: bool = True

    @property
    def all(self) -> Culprits:
        """Everything but what draws."""
        return [*self.modules, *self.sums]


def examine(case: Case) -> Found:
    """Switch off what draws at random, for good, and run a few samples together and apart."""
    training = [module for module in case.module.modules() if module.training]
    for most in (MAX_PICKED, 2):
        for module in training:  # what an attempt that ran out of memory switched off
            module.training = True
        with AllocationGuard():
            whole, ways = _pick(case, most)
            quiet, loud = _silence(case, whole)
            return find(case, whole, ways, excused=loud)._replace(quiet=quiet, loud=loud)
        release_memory()
    return Found([], [], was_checked=False)


def _silence(case: Case, micro_batch: MicroBatch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Switch off the modules that draw random numbers; give those that stop, and the others.

    Only they leave training mode, not their children: BatchNorm, say, stays as it is in training.
    """
    modules = dict(case.module.named_modules())
    found: dict[str, None] = {}
    while True:
        drawn = record(case, micro_batch).drawn
        new = [name for name in drawn if name not in found]
        if not new:
            return tuple(name for name in found if name not in drawn), drawn
        found |= dict.fromkeys(new)
        for name in new:
            if name != OUTSIDE:
                modules[name].training = False


def _pick(case: Case, most: int) -> tuple[MicroBatch, Ways]:
    """Load a few samples, or groups that stay together, of different length together and apart."""
    units = case.units()
    lengths = np.array([case.batch.plan.lengths[unit].max() for unit in units])
    by_length = [units[i] for i in lengths.argsort(kind="stable")]
    count, longest = min(most, len(units)), int(lengths.max())
    chosen = [by_length[len(units) - 1 - i * len(units) // count] for i in range(count)]
    padded = [case.load(unit, pad_to=longest) for unit in chosen]
    ways = {NEIGHBOURS: padded, PADDING: [case.load(unit) for unit in chosen]}
    return case.load(np.concatenate(chosen)), ways


def find(case: Case, whole: MicroBatch, ways: Ways, *, excused: Collection[str] = ()) -> Found:
    """Find what makes a sample depend on its micro-batch, but for modules that are excused.

    A module is only charged with the first of the `ways` to part the samples that it reacts to.
    """
    trace, parts = record(case, whole), next(iter(ways.values()))
    moved, unrepeatable = repeat(case, trace, parts[0])
    reasons = dict.fromkeys(unrepeatable, UNREPEATABLE) | dict.fromkeys(moved, STATEFUL)
    fields, sums = _compare_ways(case, trace, ways, reasons)
    modules = dict(case.module.named_modules())
    for name, module in modules.items():
        # Behind a gate that is still zero its output does not count yet, and shows nothing.
        is_live = isinstance(module, _BatchNorm) and (name, 0) in trace.calls
        if is_live and (module.training or module.running_mean is None or name in reasons):
            reasons[name] = NORMALISES
    charged = {n: r for n, r in reasons.items() if n in modules and n not in excused}
    data = [(f"data field {name}", FIELD) for name in sorted(fields)]
    added = _added_faults(case, trace, parts) if sums else []
    faults: Culprits = []
    if case.kit.objective.scope == "sample":
        if case.kit.normalizer != "samples":
            faults += _weight_faults(case, trace, parts)
        if not (data or added):
            faults += _sum_faults(case, trace, sums)
    return Found([*added, *describe(modules, charged), *data], faults)


def _compare_ways(
    case: Case, trace: Trace, ways: Ways, reasons: dict[str, str]
) -> tuple[set[str], dict[str, list[Sums]]]:
    """Run the samples of a trace apart, and add the modules that are to blame to the reasons.

    Gives the fields of the data that differ, and the sums of each way in which all parts ran.
    """
    failures, fields, sums = dict[str, str](), set[str](), dict[str, list[Sums]]()
    for changes, parts in ways.items():
        places = shares(trace.micro_batch, parts, packed=case.batch.plan.packed)
        passes = [compare(case, trace, m, share) for m, share in zip(parts, places, strict=True)]
        reason = f"gives a sample another output when {changes} changes{CAUSES.get(changes, '')}"
        for found in passes:
            for name in found.blamed:
                reasons.setdefault(name, reason)
            fields.update(found.fields)
            failures |= dict([found.failure] if found.failure else [])
        complete = [found.sums for found in passes if found.sums is not None]
        if len(complete) == len(passes):
            sums[changes] = complete
    for name, failure in failures.items():
        reasons.setdefault(name, failure)
    return fields, sums


def describe(modules: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> Culprits:
    """Put modules into words; those that differ in their numbers only share a line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, reason in reasons.items():
        kind = type(modules[name]).__name__
        groups.setdefault((re.sub(r"\d+", "*", name), kind, reason), []).append(name)
    return [
        (pattern, f"{len(names)} x {kind} {reason}")
        if len(names) > 1
        else (names[0] or f"{kind} (in its own forward)", f"{kind} {reason}")
        for (pattern, kind, reason), names in groups.items()
    ]


def _sum_faults(case: Case, trace: Trace, sums: Mapping[str, Sequence[Sums]]) -> Culprits:
    """Name every loss term that is no sum over samples; `sums` are theirs apart, by what changes.

    A loss that is no sum can be exact for one cut: a mean over micro-batches of one size, say.
    """
    faults = Culprits()
    for term, loss in trace.sums.losses.items():
        # A group without a loss term may leave it out.
        apart = {way: [float(s.losses.get(term, 0.0)) for s in sums[way]] for way in sums}
        wrong = [way for way, each in apart.items() if not _adds_up(loss, each)]
        if not wrong:
            continue
        last = apart[wrong[-1]]
        remedy = REMEDY_OF_MODEL if isinstance(case.kit.objective, ModelLoss) else REMEDY
        reason = (
            f"`{term}` is no sum: {len(trace.micro_batch.ids)} samples together give "
            f"{float(loss):.6g}, in {len(last)} groups they add up to {sum(last):.6g}; it divides "
            f"by a count of its own, or couples samples; {remedy}"
        )
        if wrong[0] == PADDING and len(sums) > 1:
            reason = (
                f"`{term}` changes with padding: {sum(last):.6g} without, {float(loss):.6g} with "
                "it; mask padded positions in the loss, or use samples of one length"
            )
        faults.append((case.objective_name, reason))
    return faults


def _weight_faults(case: Case, trace: Trace, parts: Sequence[MicroBatch]) -> Culprits:
    """Name every weight of a loss that is no count over samples."""
    faults = Culprits()
    for term, weight in trace.micro_batch.weights.items():
        apart = [m.weights[term] for m in parts]
        if term in trace.sums.losses and not _adds_up(weight, apart, WEIGHT_TOLERANCE):
            reason = (
                f"the weight of `{term}` does not add up: {len(trace.micro_batch.ids)} samples "
                f"together weigh {weight:g}, in {len(parts)} groups {sum(apart):g}; `weights` must "
                "count what `sums` adds up, or the loss is not divided by it"
            )
            faults.append((case.objective_name, reason))
    return faults


def _added_faults(case: Case, trace: Trace, parts: Sequence[MicroBatch]) -> Culprits:
    """Name the losses that a model adds to its own, such as a router's, and that are no sums."""
    added, kind, faults = _added(trace), type(case.module).__name__, Culprits()
    traces = [_added(record(case, part)) for part in parts] if added else []
    for name, value in added.items():
        apart = [float(each.get(name, math.nan)) for each in traces]
        if not _adds_up(value, apart):
            reason = (
                f"`{name}`, which {kind} adds to its loss, is no sum over samples but a statistic "
                f"of the micro-batch, as a router's load balance is: together it is "
                f"{float(value):.6g}, in {len(parts)} groups {sum(apart):.6g} in all; switch it "
                "off in the model's config (output_router_logits=False, or a coefficient of 0), or "
                "use one micro-batch per step"
            )
            faults.append((f"{kind}.{name}", reason))
    return faults


def _added(trace: Trace) -> Mapping[str, Tensor]:
    """List the losses beside `.loss` that the model's first call gave and its loss depends on."""
    if ("", 0) not in trace.calls:
        return {}
    outputs = trace.calls["", 0].outputs
    return {
        path.rpartition(".")[2]: outputs.values[path]
        for path, gradient in outputs.gradients.items()
        if path.endswith("loss") and path.rpartition(".")[2] != "loss"
        if gradient is not None and not gradient.dim() and float(gradient)
    }


def _adds_up(
    together: Tensor | float, apart: Sequence[float], tolerance: float = SINGLE_TOLERANCE
) -> bool:
    """Whether values of groups add up to that of all; to none if that is no number either."""
    if isinstance(together, Tensor) and together.dtype == torch.float64:
        tolerance = TOLERANCE
    together, summed = float(together), sum(apart)
    if not math.isfinite(together) and not math.isfinite(summed):
        return True
    size = max(abs(together), *map(abs, apart))  # signed sums may cancel
    return abs(together - summed) <= max(tolerance * size, 1e-12)
