"""Find what makes a step depend on its cut, by running samples together and apart."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, release_memory
from trainer.models.norms import NORMALISES, has_running_statistics, normalizes_batch
from trainer.plan.cut import IntArray
from trainer.verify.case import Case
from trainer.verify.report import Verdict
from trainer.verify.trace import Losses, Trace, compare, record_trace, repeat, shares


class Reason(NamedTuple):
    """Why something is a culprit, for a person, and the verdict that it alone leads to."""

    text: str
    verdict: Verdict = "not_exact"


NamedReasons = list[tuple[str, Reason]]
"""Names of modules, the objective, the data or a setting, each with the reason."""

Faults = Iterator[tuple[str, Reason]]

# What a sample does not share when it is run in another micro-batch.
NEIGHBOURS, PADDING = "the rest of its micro-batch", "its padding"

# Relative differences of two sums that are rounding: in float64, in fewer bits, and of weights,
# which may be sums of the data's own float32 numbers.
TOLERANCE, SINGLE_TOLERANCE, WEIGHT_TOLERANCE = 1e-9, 1e-4, 1e-6

MAX_PICKED = 4  # samples that are run together and alone

UNREPEATABLE = Reason(
    "gives another output each time: it draws from a generator that no seed of the run governs, or "
    "is not deterministic; draw from PyTorch's default generator",
    verdict="not_proven",
)

STATEFUL = Reason(
    "keeps state that every micro-batch updates and the next one reads: update it once per step, "
    "or not in training"
)

FIELD = Reason(
    "a sample's value of this field changes with its neighbours in the micro-batch: it is drawn or "
    "computed in `collate`, or padded on the left; or it changes from read to read, drawn by a "
    "generator that no seed governs: draw with torch, np.random or random"
)

CAUSES = {
    NEIGHBOURS: ": capacity routing, or statistics or attention over the micro-batch: let it work "
    "on each sample alone (routing: without dropping), or use one micro-batch per step",
    PADDING: ": mask the padding, or use a layer that looks only backwards, or samples of one "
    "length",
}

REMEDY = (
    "it divides inside `sums`, or couples samples: return an undivided sum from `sums`, and its "
    "number of terms from `weights`"
)
REMEDY_OF_MODEL = (
    "the model averages its own loss, or couples samples: set objective.reduction=mean if it "
    "ignores num_items_in_batch, or flip objective.causal, or use an objective that "
    "sums, such as next_token or classify; what a router adds, its config switches off "
    "(output_router_logits=False)"
)
REMEDY_OF_WEIGHT = "`weights` must count exactly the terms that `sums` adds up"

# Ways to part a micro-batch into smaller ones, in order, by what these do not share with it.
Ways = Mapping[str, Sequence[MicroBatch]]


class Found(NamedTuple):
    """What was found in a few samples."""

    # Those that couple samples, heed padding, keep state or cannot be repeated; fields of the data
    # that change with a sample's neighbours
    modules: NamedReasons
    sums: NamedReasons  # loss terms and weights of the objective that do not add up
    # Modules that draw at random in training mode only, and can be held
    quiet: Collection[str] = ()
    loud: Collection[str] = ()  # the others that draw; `trace.OUTSIDE` is the objective
    was_checked: bool = True  # whether two samples fit into memory, or all of this is empty


def examine(case: Case) -> tuple[Case, Found]:
    """Run a few samples together and apart; gives the case back with its draws held, if any."""
    for most in (MAX_PICKED, 2):
        with AllocationGuard():
            whole, ways = _pick(case, most)
            drawn, loud = record_trace(case, whole).drawn, list[str]()
            constant = replace(case, holds_draws=bool(drawn))
            if drawn:
                always = record_trace(case, whole, off=drawn).drawn
                together = record_trace(constant, whole).drawn
                apart = record_trace(constant, ways[NEIGHBOURS][0]).drawn
                for name in drawn:
                    # Draws left over are equal too where generators end equally: for every size.
                    if name in always or together.get(name) != apart.get(name):
                        loud.append(name)
            quiet = [*filterfalse(loud.__contains__, drawn)]
            found = find_modules(constant, whole, ways, excused=loud)
            return constant, found._replace(quiet=quiet, loud=loud)
        release_memory()
    return case, Found([], [], was_checked=False)


def _pick(case: Case, most: int) -> tuple[MicroBatch, Ways]:
    """Load a few samples, or groups that stay together, of different length together and apart."""
    units = case.units()
    lengths = np.array([case.batch.plan.lengths[unit].max() for unit in units])
    by_length = lengths.argsort(kind="stable")
    count, longest = min(most, len(units)), int(lengths.max())
    chosen = list[IntArray]()
    # From the longest down, in equal steps of rank.
    for i in range(count):
        place = len(units) - 1 - i * len(units) // count
        chosen.append(units[by_length[place]])
    whole, start, padded = case.load(np.concatenate(chosen)), 0, []
    for unit in chosen:
        part = case.load(unit, pad_to=longest)
        if not case.batch.plan.packed:
            part = _padded_like(whole, start, part)
        padded.append(part)
        start += len(unit)
    return whole, {NEIGHBOURS: padded, PADDING: [*map(case.load, chosen)]}


def _padded_like(whole: MicroBatch, start: int, part: MicroBatch) -> MicroBatch:
    """Pad samples as in a larger micro-batch, also what has other lengths than tokens: sounds."""
    fields = dict(part.fields)
    for name, field in fields.items():
        rows = whole.fields[name][start : start + len(part.ids)]
        is_of_samples = field.dim() == rows.dim() and len(field) == len(rows) < len(whole.ids)
        if is_of_samples and field.shape != rows.shape:
            fields[name] = rows
    return replace(part, fields=fields)


def find_modules(
    case: Case, whole: MicroBatch, ways: Ways, *, excused: Collection[str] = ()
) -> Found:
    """Find what makes a sample depend on its micro-batch.

    A module is only charged with the first of the ways to part the samples that it reacts to.
    `excused` modules are not charged, since they draw all the same.
    """
    trace, parts = record_trace(case, whole), next(iter(ways.values()))
    moved, unrepeatable = repeat(case, trace, parts[0])
    reasons = dict.fromkeys(unrepeatable, UNREPEATABLE) | dict.fromkeys(moved, STATEFUL)
    fields, losses = _compare_ways(case, trace, ways, reasons)
    modules = dict(case.module.named_modules())
    for name, module in modules.items():
        # Behind a gate that is still zero its output does not count yet, and shows nothing.
        is_live = has_running_statistics(module) and (name, 0) in trace.calls
        if is_live and (normalizes_batch(module) or name in reasons):
            reasons[name] = Reason(NORMALISES)
    charged = dict[str, Reason]()
    for name, reason in reasons.items():
        # What stands outside of all modules is the objective, whose sums are judged below.
        if name in modules and name not in excused:
            charged[name] = reason
    data = [(f"data field {name}", FIELD) for name in sorted(fields)]
    faults = NamedReasons()
    if case.context.model.objective.coupling.kind != "batch":
        if case.context.model.normalizer != "samples":
            faults += _weight_faults(case, trace, parts)
        if not data:
            faults += _sum_faults(case, trace, losses)
    return Found([*name_reasons(modules, charged), *data], faults)


def _compare_ways(
    case: Case, trace: Trace, ways: Ways, reasons: dict[str, Reason]
) -> tuple[set[str], dict[str, list[Losses]]]:
    """Run the samples of a trace apart, and add the modules that are to blame to the reasons.

    Gives the fields of the data that differ, and the losses of each way in which all parts ran.
    """
    failures, fields, losses = dict[str, str](), set[str](), dict[str, list[Losses]]()
    for changes, parts in ways.items():
        places = shares(trace.micro_batch, parts, packed=case.batch.plan.packed)
        text = f"changes the output of a sample when {changes} changes{CAUSES.get(changes, '')}"
        complete = list[Losses]()
        for part, share in zip(parts, places, strict=True):
            found = compare(case, trace, part, share)
            for name in found.blamed:
                reasons.setdefault(name, Reason(text))
            fields.update(found.fields)
            failures |= found.failure
            if found.losses is not None:
                complete.append(found.losses)
        # Sums of some of the parts say nothing of the whole.
        if len(complete) == len(parts):
            losses[changes] = complete
    for name, failure in failures.items():
        reasons.setdefault(name, Reason(failure))
    return fields, losses


def name_reasons(modules: Mapping[str, nn.Module], reasons: Mapping[str, Reason]) -> NamedReasons:
    """Put modules into words; those that differ in their numbers only share a line."""
    groups: dict[tuple[str, str, Reason], list[str]] = {}
    for name, reason in reasons.items():
        kind = type(modules[name]).__name__
        groups.setdefault((re.sub(r"\d+", "*", name), kind, reason), []).append(name)
    culprits = NamedReasons()
    for (pattern, kind, reason), names in groups.items():
        # The name of the model itself, among its modules, is empty.
        name, what = names[0] or f"{kind} (in its own forward)", kind
        if len(names) > 1:
            name, what = pattern, f"{len(names)} x {kind}"
        culprits.append((name, Reason(f"{what} {reason.text}", reason.verdict)))
    return culprits


def _sum_faults(case: Case, trace: Trace, ways: Mapping[str, Sequence[Losses]]) -> Faults:
    """Name loss terms that are no sums over samples; `ways` are theirs apart, by what changes."""
    # It can be exact for one cut: a mean over micro-batches of one size, say.
    remedy = REMEDY_OF_MODEL if case.context.model.objective.is_of_model else REMEDY
    for term, loss in trace.losses.items():
        apart, wrong = dict[str, list[float]](), list[str]()
        for way, losses in ways.items():
            # A group without a loss term may leave it out.
            apart[way] = [float(each.get(term, 0.0)) for each in losses]
            if not _adds_up(loss, apart[way]):
                wrong.append(way)
        if wrong == [PADDING] and len(ways) > 1:
            text = (
                f"`{term}` changes with padding: {sum(apart[PADDING]):.6g} without, "
                f"{float(loss):.6g} with it; mask padded positions in the loss, or use samples of "
                "one length"
            )
            yield case.objective_name, Reason(text)
        elif wrong:
            yield case.objective_name, _no_sum(f"`{term}`", loss, apart[wrong[-1]], remedy)


def _weight_faults(case: Case, trace: Trace, parts: Sequence[MicroBatch]) -> Faults:
    """Name every weight of a loss that is no count over samples."""
    for term, weight in trace.micro_batch.weights.items():
        apart = [m.weights[term] for m in parts]
        if term in trace.losses and not _adds_up(weight, apart, WEIGHT_TOLERANCE):
            reason = _no_sum(f"the weight of `{term}`", weight, apart, REMEDY_OF_WEIGHT)
            yield case.objective_name, reason


def _no_sum(what: str, together: Tensor | float, apart: Sequence[float], remedy: str) -> Reason:
    return Reason(
        f"{what} is not a sum: the same samples give {float(together):.6g} together, but "
        f"{sum(apart):.6g} in {len(apart)} groups; {remedy}"
    )


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
