"""Finds what makes a step depend on its cut, by running samples together and apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, release_memory
from trainer.verify.additivity import (
    SINGLE_TOLERANCE,
    TOLERANCE,
    Sight,
    sum_faults,
    weight_faults,
)
from trainer.verify.align import Share, align, close, shares
from trainer.verify.copies import Groups, Scratch
from trainer.verify.router_losses import Added, adds, auxiliary
from trainer.verify.trace import OUTSIDE, Difference, Trace, compare, record, repeat

Culprits = list[tuple[str, str]]
"""Names of modules, the objective, the data or a setting, each with the reason."""

UNREPEATABLE = (
    "gives something else each time: it draws from a generator that no seed of the run governs, or "
    "is not deterministic; draw from PyTorch's default generator"
)

MAX_PICKED = 4
"""Samples that are run together and alone."""


@final
@dataclass(frozen=True, slots=True)
class Draws:
    """Modules that draw random numbers.

    Attributes:
        quiet: those that stop doing so in evaluation mode, and are in it now.
        loud: those that do not.
    """

    quiet: tuple[str, ...]
    loud: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.quiet or self.loud)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, as they are said to a reader."""
        return tuple(
            {OUTSIDE: "the objective", "": "the model itself"}.get(name, name)
            for name in (*self.quiet, *self.loud)
        )


@final
@dataclass(slots=True)
class Found:
    """What was found.

    Attributes:
        auxiliary: losses that the model adds to its own.
        modules: that couple samples, heed padding, keep state or cannot be repeated.
        objective: loss terms and weights that do not add up.
        data: fields of a sample that change with its neighbours.
    """

    auxiliary: Culprits = field(default_factory=list)
    modules: Culprits = field(default_factory=list)
    objective: Culprits = field(default_factory=list)
    data: Culprits = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def all(self) -> Culprits:
        """Everything, what the model adds to its loss first."""
        return [*self.auxiliary, *self.modules, *self.objective, *self.data]


def silence(scratch: Scratch, micro_batch: MicroBatch) -> Draws:
    """Switch off, one by one, the modules that draw random numbers.

    Only the modules that draw leave training mode, and none of their children: what else the mode
    changes, such as BatchNorm, stays as it is in training.
    """
    modules = dict(scratch.module.named_modules())
    found: dict[str, None] = {}
    while True:
        drawn = record(scratch, micro_batch).drawn
        new = [name for name in drawn if name not in found]
        found |= dict.fromkeys(new)
        if not new:
            return Draws(tuple(name for name in found if name not in drawn), drawn)
        for name in new:
            if name != OUTSIDE:
                modules[name].training = False


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way to part a micro-batch.

    Attributes:
        parts: the same samples, in order, in smaller micro-batches.
        changes: what they do not share with the larger one.
        is_last_resort: whether it is only gone where another way fails.
    """

    parts: Sequence[MicroBatch]
    changes: str
    is_last_resort: bool = False


NEIGHBOURS = "the rest of its micro-batch"
PADDING = "its padding"


def pick(groups: Groups, most: int = MAX_PICKED) -> tuple[MicroBatch, list[Way]]:
    """Load a few samples, or groups that stay together, of different length together and apart.

    Args:
        groups: of the planned step.
        most: how many of them.

    Returns:
        The samples together, and the ways to part them.
    """
    units = groups.units()
    lengths = np.array([groups.lengths(unit).max() for unit in units])
    by_length = [units[i] for i in lengths.argsort(kind="stable")]
    count = min(most, len(units))
    chosen = [by_length[len(units) - 1 - i * len(units) // count] for i in range(count)]
    longest = int(lengths.max())

    def parts(*cuts: int) -> list[MicroBatch]:
        ends = zip((0, *cuts), (*cuts, count), strict=True)
        held = [np.concatenate(chosen[start:end]) for start, end in ends if start < end]
        return [groups.group(positions, pad_to=longest) for positions in held]

    ways = [
        Way(parts(*range(1, count)), NEIGHBOURS),
        Way(parts(1), NEIGHBOURS),
        Way([groups.group(unit) for unit in chosen], PADDING),
        Way(parts(count // 2), NEIGHBOURS, True),
    ]
    return groups.group(np.concatenate(chosen)), ways


def find(
    scratch: Scratch,
    whole: MicroBatch,
    ways: Sequence[Way],
    *,
    packed: bool = False,
    excused: Collection[str] = (),
) -> Found:
    """Find what makes a sample depend on its micro-batch.

    Args:
        scratch: draws nothing at random, as far as it can be kept from it.
        whole: some samples as one micro-batch.
        ways: to part it; a module is only charged with the first change it reacts to.
        packed: whether their rows are packed.
        excused: modules that are charged otherwise.
    """
    trace = record(scratch, whole)
    modules = dict(scratch.module.named_modules())
    failures, found = dict[str, str](), Found()
    reasons = _unsteady(scratch, trace, ways[0].parts[0])
    sights: list[Sight] = []
    for way in ways:
        if way.is_last_resort and not failures:
            continue
        places = shares(whole, way.parts, packed=packed)
        found.data = found.data or _data_faults(whole, way, places)
        passes = [compare(scratch, trace, m, s) for m, s in zip(way.parts, places, strict=True)]
        _charge(modules, way, passes, reasons, failures)
        if all(each.sums is not None for each in passes):
            sights.append(_sight(trace, way, passes))
    for name, text in failures.items():
        # What the objective raises, outside of any module, it is asked about itself.
        if name in modules:
            reasons.setdefault(name, _reason(modules[name], NEIGHBOURS, text))
    # Behind a gate that is still zero their output does not count yet, and shows nothing.
    norms = [n for n, m in modules.items() if (n, 0) in trace.calls and _takes_batch_statistics(m)]
    reasons |= {n: _reason(modules[n], NEIGHBOURS) for n in norms if n not in reasons}
    charged = {name: reason for name, reason in reasons.items() if name not in excused}
    added = _added(scratch, trace, sights)
    found.modules, found.auxiliary = described(modules, charged), added.faults
    sights = [] if found.data or added.explains else sights
    found.objective = _of_objective(scratch, trace, ways[0], sights)
    return found


def _added(scratch: Scratch, trace: Trace, sights: Sequence[Sight]) -> Added:
    """Look at the losses that the model itself adds to its own."""
    if not (sights and adds(trace)):
        return Added([], explains=False)
    parts = [record(scratch, part) for part in sights[0].parts]
    return auxiliary(scratch.module, trace, parts, _tolerance(trace))


def _of_objective(scratch: Scratch, trace: Trace, way: Way, sights: Sequence[Sight]) -> Culprits:
    """Name the loss sums and the weights that do not add up."""
    objective, losses = scratch.kit.objective, trace.sums.losses
    if objective.scope != "sample":
        return []
    counts = scratch.kit.normalizer != "samples"
    faults = weight_faults(objective, trace.micro_batch, way.parts, losses) if counts else []
    return faults + sum_faults(objective, sights)


def objective_faults(
    scratch: Scratch, groups: Groups, *, packed: bool
) -> tuple[Culprits | None, Draws]:
    """Check an objective on its own, whatever the comparison of gradients said.

    A loss that is no sum can be exact for one cut: a mean over micro-batches of one size, say.

    Args:
        scratch: what draws at random in it is switched off.
        groups: of the planned step.
        packed: whether its rows are packed.

    Returns:
        Its faults, None where not even two samples fit into memory; and what draws at random.
    """
    draws = Draws((), ())
    for most in (MAX_PICKED, 2):
        with AllocationGuard():
            whole, ways = pick(groups, most)
            draws = silence(scratch, whole)
            if draws.loud:
                return [], draws
            return find(scratch, whole, ways, packed=packed).objective, draws
        release_memory()
    return None, draws


def described(modules: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> Culprits:
    """Put modules into words; those that differ in their numbers only share a line."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, reason in reasons.items():
        kind = type(modules[name]).__name__
        alike.setdefault((re.sub(r"\d+", "*", name), kind, reason), []).append(name)
    lines = []
    for (pattern, kind, reason), names in alike.items():
        many = f"{len(names)} x " if len(names) > 1 else ""
        name = (names[0] if len(names) == 1 else pattern) or f"{kind} (in its own forward)"
        lines.append((name, f"{many}{kind} {reason}"))
    return lines


def _charge(
    modules: Mapping[str, nn.Module],
    way: Way,
    passes: Sequence[Difference],
    reasons: dict[str, str],
    failures: dict[str, str],
) -> None:
    """Add what one way showed to the reasons, and to the modules that it failed in."""
    for each in passes:
        for name in each.blamed:
            reasons.setdefault(name, _reason(modules[name], way.changes))
        if each.failure is not None:
            name, text = each.failure
            failures.setdefault(name, f"cannot run on {_samples(len(way.parts[0].ids))}: {text}")


def _unsteady(scratch: Scratch, trace: Trace, other: MicroBatch) -> dict[str, str]:
    moved, unrepeatable = repeat(scratch, trace, other)
    reasons = dict.fromkeys(unrepeatable, UNREPEATABLE)
    state = (
        "keeps state that every micro-batch moves and the next one depends on: move it once per "
        "step, or not in training"
    )
    return reasons | dict.fromkeys(moved, state)


def _takes_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _reason(module: nn.Module, changes: str, failure: str = "") -> str:
    if isinstance(module, _BatchNorm):
        return (
            "normalises over the samples of its micro-batch: use GroupNorm or LayerNorm, or one "
            "micro-batch per step"
        )
    if failure:
        return failure
    causes = {
        NEIGHBOURS: "capacity routing, or statistics or attention over the micro-batch: let it "
        "work on each sample alone (routing: without dropping), or use one micro-batch per step",
        PADDING: "mask the padding, or use a layer that looks only backwards, or samples of one "
        "length",
    }
    cause = f": {causes[changes]}" if changes in causes else ""
    return f"gives a sample another output when {changes} changes{cause}"


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"


def _data_faults(whole: MicroBatch, way: Way, places: Sequence[Share]) -> Culprits:
    """Compare what the data give for the same samples."""
    changed: dict[str, None] = {}
    for part, share in zip(way.parts, places, strict=True):
        for name in whole.fields.keys() & part.fields.keys():
            pair = align(whole.fields[name], part.fields[name], share)
            if pair is not None and not close(*pair):
                changed[name] = None
    reason = (
        "the data give this field of a sample another value when its neighbours change: it is "
        "drawn or computed in `collate`, or padded on the left"
    )
    return [(f"data field {name}", reason) for name in sorted(changed)]


def _sight(trace: Trace, way: Way, passes: Sequence[Difference]) -> Sight:
    return Sight(
        whole=trace.micro_batch,
        parts=way.parts,
        sums=(trace.sums, [each.sums for each in passes if each.sums is not None]),
        repads=way.changes != NEIGHBOURS,
        tolerance=_tolerance(trace),
    )


def _tolerance(trace: Trace) -> float:
    is_double = all(loss.dtype == torch.float64 for loss in trace.sums.losses.values())
    return TOLERANCE if is_double else SINGLE_TOLERANCE
