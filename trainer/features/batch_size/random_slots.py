"""Give a step a few micro-batches of random samples, by which the noise of gradients is measured.

A cut sorts by length, so that micro-batches differ by more than chance, which would be taken for
noise: 4.5 times too much on lognormal lengths. The step stays what it is, as under any other cut.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean

import numpy as np

from trainer.assemble.run_plan import RunPlan
from trainer.core.errors import ConfigError
from trainer.features.batch_size.noise_ramp import NoiseSize
from trainer.plan.cut import Cut, IntArray, Layout, Plan
from trainer.plan.partition import pad_lengths, padded_apart, reduce_groups
from trainer.plan.permutation import drawn_whole
from trainer.tune.speed import speed_of

# Micro-batches over all ranks: a standard error of half the noise at the very most.
NUM_RANDOM = 8
# At most one in so many samples, since these are padded more than others.
LARGEST_SHARE = 8
# Steps between those with random micro-batches, at least, and the most that these may add to the
# time of a run
LEAST_RANDOM_EVERY, RANDOM_COST = 10, 0.005


def steps_between(asked: int | str | None, run_plan: RunPlan) -> int | None:
    """Choose the steps between those that have them; None where nothing is, or can be, measured.

    Left to itself by what such a step takes beyond one of the cut's.
    """
    run, plans = run_plan.run, run_plan.plans
    layout = run.layout
    # Sizes that follow the noise cannot do without it.
    is_needed = isinstance(run.data.order.sizes, NoiseSize)
    if asked is None and not is_needed:
        return None
    random = list[Plan]()
    if run.model.adds_up:
        random = [with_random_slots(plan, run.cut, layout, "") for plan in plans]
    is_measured = any(plan.random_slots for plan in random)
    what, remedy = f"log.noise_scale={asked}: the noise scale", "log.noise_scale=auto"
    if is_needed:
        is_measured = bool(random) and random[0].random_slots > 0
        what, remedy = "batch: sizes follow the noise scale, which", "accum=auto"
    if not is_measured and (is_needed or isinstance(asked, int)):
        raise ConfigError(
            f"{what} needs two micro-batches of a step, each of one backward: type {remedy} or a "
            "larger batch.global, or see docs/how-to/batch-size.md"
        )
    if isinstance(asked, int):
        return asked
    if not random:
        return None
    speed = speed_of(run_plan.tuning.cost if run_plan.tuning else layout.cost)
    seconds = partial(speed.step_seconds, lockstep=layout.lockstep)
    more = fmean(seconds(drawn) / seconds(p) for drawn, p in zip(random, plans, strict=True)) - 1
    return max(LEAST_RANDOM_EVERY, math.ceil(more / RANDOM_COST))


def with_random_slots(plan: Plan, cut: Cut, layout: Layout, key: str) -> Plan:
    """Cut a global batch anew, with micro-batches of random samples at the front of every rank.

    A plan whose micro-batches look nowhere at lengths has them already: those of samples in their
    order, which is random. Each new one takes no more samples and positions than the largest of the
    plan, and all ranks have as many. A cut that does not choose sizes is left as it is, as is a
    batch too small to divide. `key` is that of the draw.
    """
    wanted = -(-NUM_RANDOM // layout.world_size)
    # A cut whose samples are of one length, or lie in their order, cannot have looked at lengths.
    slots = [*chain.from_iterable(plan.ranks)]
    is_in_order = all((np.diff(slot) == 1).all() for slot in slots)
    is_constant = (plan.lengths == plan.lengths[:1]).all()
    if (is_constant or is_in_order) and plan.num_micro_batches > 1:
        # Noise shows in how micro-batches differ, so one alone shows none.
        first = chain.from_iterable(own[:wanted] for own in plan.ranks)
        has_one = np.count_nonzero([*map(len, first)]) <= 1
        return plan if has_one else replace(plan, random_slots=wanted)
    size = layout.group_size
    # A short last one stays where it is.
    num_groups = plan.num_samples // size
    room = max(2, num_groups // LARGEST_SHARE)
    wanted = max(1, min(wanted, room // layout.world_size))
    count = wanted * layout.world_size
    if not cut.chooses_sizes or num_groups < max(2, count):
        return plan
    # As many groups as a micro-batch may have and need no more than the plan's largest.
    padded = plan.lengths if layout.packed else pad_lengths(plan.lengths, layout)
    if layout.packed:
        needs = reduce_groups(np.add, np.maximum(padded, 1), size)
    else:
        needs = reduce_groups(np.maximum, padded, size) * size
    most = min(max(map(len, slots)) // size, plan.max_positions // max(1, int(needs.max())))
    per_slot = max(1, min(room // count, most))
    groups = drawn_whole(num_groups, key)
    groups = np.sort(groups[: count * per_slot].reshape(count, per_slot), axis=1)
    drawn = (groups[..., None] * size + np.arange(size)).reshape(count, -1)
    ranks = [(*drawn[rank * wanted : (rank + 1) * wanted],) for rank in range(layout.world_size)]
    rest = np.setdiff1d(np.arange(plan.num_samples), drawn)
    own = padded_apart(ranks, plan.lengths, layout, cut.hard_cap)
    if not len(rest):
        return replace(own, random_slots=wanted)
    others = cut.cut(plan.lengths[rest], layout)
    both = list[tuple[IntArray, ...]]()
    for at_front, behind in zip(ranks, others.ranks, strict=True):
        # The cut of the others counts from 0 among them.
        both.append((*at_front, *(rest[slot] for slot in behind)))
    pairs = zip(own.padded_lengths, others.padded_lengths, strict=True)
    padded_lengths = tuple((*at_front, *behind) for at_front, behind in pairs)
    return replace(own, ranks=(*both,), padded_lengths=padded_lengths, random_slots=wanted)
