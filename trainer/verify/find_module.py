"""Find what makes a step depend on its cut, by running samples together and apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.core.micro_batch import MicroBatch
from trainer.core.out_of_memory import AllocationGuard, release_memory
from trainer.verify.align import align, close, shares
from trainer.verify.copies import Groups, Scratch
from trainer.verify.sums import Sight, added_faults, sum_faults, weight_faults
from trainer.verify.trace import OUTSIDE, Trace, compare, record, repeat

Culprits = list[tuple[str, str]]
"""Names of modules, the objective, the data or a setting, each with the reason."""

UNREPEATABLE = (
    "gives something else each time: it draws from a generator that no seed of the run governs, or "
    "is not deterministic; draw from PyTorch's default generator"
)

STATEFUL = (
    "keeps state that every micro-batch moves and the next one depends on: move it once per step, "
    "or not in training"
)

NORMALISES = (
    "normalises over the samples of its micro-batch: use GroupNorm or LayerNorm, or one "
    "micro-batch per step"
)

NEIGHBOURS, PADDING, EITHER = "the rest of its micro-batch", "its padding", "its micro-batch"
"""What a sample does not share when it is run in another micro-batch."""

CAUSES = {
    NEIGHBOURS: ": capacity routing, or statistics or attention over the micro-batch: let it work "
    "on each sample alone (routing: without dropping), or use one micro-batch per step",
    PADDING: ": mask the padding, or use a layer that looks only backwards, or samples of one "
    "length",
    EITHER: "",
}

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

    quiet: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.quiet or self.loud)


@final
@dataclass(frozen=True, slots=True)
class Found:
    """What was found.

    Attributes:
        added: losses that the model adds to its own.
        modules: that couple samples, heed padding, keep state or cannot be repeated.
        sums: loss terms and weights of the objective that do not add up.
        data: fields of a sample that change with its neighbours.
    """

    added: Culprits
    modules: Culprits
    sums: Culprits
    data: Culprits

    @property
    def all(self) -> Culprits:
        """Everything, what the model adds to its loss first."""
        return [*self.added, *self.modules, *self.sums, *self.data]


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
    longest, half = int(lengths.max()), count // 2
    halves = [np.concatenate(each) for each in (chosen[:half], chosen[half:]) if each]
    ways = [
        Way([groups.group(unit, pad_to=longest) for unit in chosen], NEIGHBOURS),
        Way([groups.group(unit) for unit in chosen], PADDING),
        Way([groups.group(each, pad_to=longest) for each in halves], NEIGHBOURS, True),
    ]
    return groups.group(np.concatenate(chosen)), ways


def find(
    scratch: Scratch,
    whole: MicroBatch,
    ways: Sequence[Way],
    *,
    packed: bool,
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
    trace, modules = record(scratch, whole), dict(scratch.module.named_modules())
    moved, unrepeatable = repeat(scratch, trace, ways[0].parts[0])
    reasons = dict.fromkeys(unrepeatable, UNREPEATABLE) | dict.fromkeys(moved, STATEFUL)
    sights = _part(scratch, trace, ways, reasons, packed=packed)
    # Behind a gate that is still zero their output does not count yet, and shows nothing.
    norms = [n for n, m in modules.items() if (n, 0) in trace.calls and _takes_batch_statistics(m)]
    reasons |= {n: NORMALISES for n in norms if n not in reasons}
    charged = {name: reason for name, reason in reasons.items() if name not in excused}
    data = next((found for way in ways if (found := _data_faults(whole, way, packed=packed))), [])
    added, explains = added_faults(scratch, trace, sights[0].parts) if sights else ([], False)
    sums: Culprits = []
    if scratch.kit.objective.scope == "sample":
        if scratch.kit.normalizer != "samples":
            sums += weight_faults(scratch, trace, ways[0].parts)
        if not (data or explains):
            sums += sum_faults(scratch, trace, sights)
    return Found(added, describe(modules, charged), sums, data)


def _part(
    scratch: Scratch, trace: Trace, ways: Sequence[Way], reasons: dict[str, str], *, packed: bool
) -> list[Sight]:
    """Run the samples of a trace apart, and add the modules that are to blame to the reasons.

    Returns:
        The loss sums of each way in which all of its parts ran.
    """
    modules, failures, sights = dict(scratch.module.named_modules()), dict[str, str](), []
    for way in ways:
        if way.is_last_resort and not failures:
            continue
        places = shares(trace.micro_batch, way.parts, packed=packed)
        passes = [compare(scratch, trace, m, s) for m, s in zip(way.parts, places, strict=True)]
        for name in dict.fromkeys(name for each in passes for name in each.blamed):
            is_norm = isinstance(modules[name], _BatchNorm)
            reason = (
                f"gives a sample another output when {way.changes} changes{CAUSES[way.changes]}"
            )
            reasons.setdefault(name, NORMALISES if is_norm else reason)
        failures |= dict(each.failure for each in passes if each.failure is not None)
        sums = [each.sums for each in passes if each.sums is not None]
        if len(sums) == len(passes):
            sights.append(Sight(way.parts, places, sums, repads=way.changes == PADDING))
    for name in failures.keys() & modules.keys():  # outside of them it is the objective that failed
        is_norm = isinstance(modules[name], _BatchNorm)
        reasons.setdefault(name, NORMALISES if is_norm else failures[name])
    return sights


def check_objective(
    scratch: Scratch, groups: Groups, *, packed: bool
) -> tuple[Culprits | None, Draws]:
    """Check an objective on its own, whatever the comparison of gradients gave.

    A loss that is no sum can be exact for one cut: a mean over micro-batches of one size, say.

    Args:
        scratch: what draws at random in it is switched off.
        groups: of the planned step.
        packed: whether its rows are packed.

    Returns:
        Its faults, None where not even two samples fit into memory; and what draws at random.
    """
    draws = Draws()
    for most in (MAX_PICKED, 2):
        with AllocationGuard():
            whole, ways = pick(groups, most)
            draws = silence(scratch, whole)
            if draws.loud:
                return [], draws
            return find(scratch, whole, ways, packed=packed).sums, draws
        release_memory()
    return None, draws


def describe(modules: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> Culprits:
    """Put modules into words; those that differ in their numbers only share a line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, reason in reasons.items():
        kind = type(modules[name]).__name__
        groups.setdefault((re.sub(r"\d+", "*", name), kind, reason), []).append(name)
    lines = []
    for (pattern, kind, reason), names in groups.items():
        many = f"{len(names)} x " if len(names) > 1 else ""
        name = (names[0] if len(names) == 1 else pattern) or f"{kind} (in its own forward)"
        lines.append((name, f"{many}{kind} {reason}"))
    return lines


def _takes_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _data_faults(whole: MicroBatch, way: Way, *, packed: bool) -> Culprits:
    """Compare what the data give for the same samples."""
    places = shares(whole, way.parts, packed=packed)
    changed = {
        name
        for part, share in zip(way.parts, places, strict=True)
        for name in whole.fields.keys() & part.fields.keys()
        if (pair := align(whole.fields[name], part.fields[name], share)) and not close(*pair)
    }
    reason = (
        "the data give this field of a sample another value when its neighbours change: it is "
        "drawn or computed in `collate`, or padded on the left"
    )
    return [(f"data field {name}", reason) for name in sorted(changed)]
