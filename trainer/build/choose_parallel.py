"""`parallel=auto`, once memory can be weighed: whole copies of the model where they fit, or shards.

Whole copies need one reduction a step and nothing gathered, so they are taken wherever a step
fits; then shards within one machine, whose network is the faster; then shards over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from trainer.build.instantiate import construct
from trainer.build.parallel import is_undecided, parallel_setup, with_mode
from trainer.build.parts import Parts, bind_run, build_model
from trainer.build.prepare import dearest, sampled
from trainer.build.workload import limit_of, situation, workload
from trainer.core.format import size
from trainer.parallel.sync import SyncPolicy
from trainer.plan.cuts import Auto
from trainer.plan.memory import Shape
from trainer.plan.partition import pad
from trainer.tune.cache import Facts, TuningCache
from trainer.tune.fake import CannotRunFake, predict_peak
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.predict import BY_FAKE_RUNS
from trainer.tune.workload import Workload

IN_WORDS = {
    "ddp": "a whole copy on every rank",
    "hsdp": "a copy in shards on every machine",
    "fsdp": "one copy in shards over all ranks",
}


def choose_parallel(parts: Parts) -> Parts:
    """Settle on a parallel mode where `parallel=auto` left it open. Collective.

    Args:
        parts: as assembled; while the mode is open, a large model holds no weights.
    """
    if not is_undecided(parts.config, parts.world):
        return parts
    mode, why = parts.world.on_main(partial(_choice, parts))
    if mode != "ddp" and parts.weights is None:
        # Weighed again without the memory that the whole model took.
        parts = _rebuilt(parts, mode)
        mode, why = parts.world.on_main(partial(_choice, parts))
    if mode == "ddp" and parts.weights is not None:
        # A copy needs the weights themselves, not shards of them.
        parts = _rebuilt(parts, mode)
    return _decided(parts, mode, why)


def _rebuilt(parts: Parts, mode: str) -> Parts:
    """Build the model anew, as it is built under a parallel mode."""
    config = with_mode(parts.config, mode)
    module, weights, notes = build_model(config, parts.world, parts.train_set)
    parts.spec.freeze(module)
    call = bind_run(module, config, parts.world)
    return replace(parts, module=module, weights=weights, notes=notes, call=call)


def _decided(parts: Parts, mode: str, why: str) -> Parts:
    """Make of the parts what they would be had the mode been typed."""
    config = with_mode(parts.config, mode)
    found = parallel_setup(config, parts.world, parts.module, _policy(parts))
    return replace(
        parts,
        config=config,
        parallel=replace(found, why_mode=why),
        layout=replace(parts.layout, lockstep=found.sync.lockstep),
    )


def _policy(parts: Parts) -> SyncPolicy:
    return construct(parts.config.sync, "sync", SyncPolicy, parts.config.trust)


def _choice(parts: Parts) -> tuple[str, str]:
    """Take the first mode in which a step fits, or else the one that needs least."""
    limit, _ = limit_of(parts, workload(parts))
    if limit is None:
        return "ddp", "parallel=auto takes ddp: type accum.memory=80GiB to have memory weighed"
    weighed: dict[str, tuple[int, int]] = {}
    for mode in _modes(parts):
        needed, there = weighed[mode] = _need(parts, mode, limit)
        if needed <= there:
            break
    else:
        mode = min(weighed, key=lambda mode: weighed[mode][0])
    return mode, _why(mode, weighed, limit)


def _why(mode: str, weighed: Mapping[str, tuple[int, int]], limit: MemoryLimit) -> str:
    """Say in one line which mode `parallel=auto` takes, and what speaks for it."""
    needed, there = weighed[mode]
    costs = [f"parallel=auto takes {mode}: {IN_WORDS[mode]} needs {size(needed)}"]
    costs += [f"{other} would need {size(n)}" for other, (n, _) in weighed.items() if other != mode]
    return f"{', '.join(costs)}, and {size(there)} are there ({limit.source})"


def _modes(parts: Parts) -> Iterator[str]:
    """List the modes that this model knows on these ranks, the cheapest to run first.

    Yields:
        `ddp`, and where every parameter can be sharded, `hsdp` on several machines, and `fsdp`.
    """
    yield "ddp"
    if any(parameter.dim() == 0 for parameter in parts.module.parameters()):
        return
    if 1 < parts.world.local_size < parts.world.size:
        yield "hsdp"
    yield "fsdp"


def _need(parts: Parts, mode: str, limit: MemoryLimit) -> tuple[int, int]:
    """Predict the peak of a step on one rank, and tell what is there for it, in bytes.

    The step is the one that takes least of those the cut may choose: under `accum=auto` that of
    the longest sample alone, else the dearest there is. Where the model cannot run fake, weights
    and gradients are all that is counted.
    """
    # One rank asks while the others wait.
    alone, config = replace(parts.world, long_timeout_group=None), with_mode(parts.config, mode)
    found = parallel_setup(config, alone, parts.module, _policy(parts))
    layout = replace(parts.layout, lockstep=found.sync.lockstep)
    there = replace(parts, config=config, world=alone, parallel=found, layout=layout)
    work, shapes, cache = _least(there)
    asked = config.activation_checkpointing
    known = [
        cache.facts(recompute=each)
        for each in ((False, True) if asked == "auto" else (asked is True,))
    ]
    trained = sum(p.nbytes for p in work.model.parameters() if p.requires_grad)
    try:
        needs = [
            max(_peak(work, shape, facts, facts is cache.recomputed) for shape in shapes)
            for facts in known
        ]
    except CannotRunFake:
        needs = [2 * trained * found.replicas // alone.size]
    finally:
        cache.save()
    needed = min(needs)
    ratio = known[needs.index(needed)].ratio
    return needed, limit.for_tensors(ratio, work.resident_bytes)


def _peak(work: Workload, shape: Shape, facts: Facts, recompute: bool) -> int:
    """Predict a peak, or look it up; the tuner finds it there in turn."""
    if shape not in facts.peaks:
        facts.peaks[shape] = predict_peak(work, shape, recompute=recompute)
        facts.method = BY_FAKE_RUNS
    return facts.peaks[shape].peak_bytes


def _least(parts: Parts) -> tuple[Workload, tuple[Shape, ...], TuningCache]:
    """Name shapes of which one needs the most memory, in the smallest step there may be."""
    work = workload(parts)
    if not isinstance(parts.cut, Auto):
        plans = tuple(parts.cut.cut(lengths, parts.layout) for lengths in sampled(parts))
        return dearest(parts, work, plans)
    longest = int(pad(np.array([parts.source.lengths.max()]), parts.layout)[0])
    count = min(parts.layout.group_size, parts.source.order.most_samples)
    return work, (Shape(count, longest),), TuningCache.open(situation(parts, work))
