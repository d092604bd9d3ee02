"""Choose when a run measures its noise scale, and advise on the global batch by what it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from trainer.assemble.parts import SIZES
from trainer.assemble.run import Run
from trainer.checkpoint.state import restore
from trainer.checkpoint.store import Loaded
from trainer.core.errors import ConfigError
from trainer.core.rows import Row, row
from trainer.core.stateful import Stateful, as_part
from trainer.plan.cut import Cut, Plan
from trainer.plan.order import Cursor
from trainer.plan.random_slots import with_random_slots
from trainer.training.batch_advice import batch_advice
from trainer.training.noise import LEAST_MEASUREMENTS, NOISE, NoiseScale
from trainer.tune.request import Tuning
from trainer.tune.speed import speed_of

# Steps between those with random micro-batches, at least, and the most that these may add to the
# time of a run
LEAST_RANDOM_EVERY, RANDOM_COST = 10, 0.005
NOT_MEASURED = (
    "no gradient noise scale was measured in this run, so that nothing is known of other batches: "
    "train with log.noise_scale=auto"
)
TOO_EARLY = (
    "the gradient noise scale was measured {} of the {} times that advice on the batch takes: go "
    "on with the run, or measure more often, every N steps, with a lower log.noise_scale=N"
)


def noise_every(run: Run, cut: Cut, tuning: Tuning | None, plans: Sequence[Plan]) -> int | None:
    """Choose the steps between measurements; None where nothing is, or can be, measured.

    Left to itself by what a step with random micro-batches takes beyond one of the cut's. The plans
    are of sampled global batches.

    Raises:
        ConfigError: it was asked for, and no step of the plans can be measured.
    """
    every, layout = run.config.log.noise_scale, run.layout
    is_needed = run.data.order.sizes.measures_noise
    if every is None and not is_needed:
        return None
    random = [with_random_slots(p, cut, layout, "") for p in plans if run.model.adds_up]
    is_measured = any(plan.random_slots for plan in (random[:1] if is_needed else random))
    if not is_measured and (is_needed or isinstance(every, int)):
        what, remedy = f"log.noise_scale={every}: the noise scale", "log.noise_scale=auto"
        if is_needed:
            what, remedy = "batch: sizes follow the noise scale, which", "accum=auto"
        raise ConfigError(
            f"{what} needs two micro-batches of a step, each of one backward: type {remedy} or a "
            "larger batch.global, or see docs/how-to/batch-size.md"
        )
    if isinstance(every, int):
        return every
    if not random:
        return None
    speed, lockstep = speed_of(tuning.cost if tuning else layout.cost), layout.lockstep
    more = fmean(
        speed.step_seconds(drawn, lockstep=lockstep) / speed.step_seconds(plan, lockstep=lockstep)
        for plan, drawn in zip(plans, random, strict=True)
    )
    return max(LEAST_RANDOM_EVERY, math.ceil((more - 1) / RANDOM_COST))


def advice_at(run: Run, noise: NoiseScale, at: Cursor) -> str | None:
    """Say whether another global batch would pay than at a position of a run."""
    order, lengths = run.data.order, run.data.lengths
    size, unit = order.size_of(at), run.config.batch.unit
    by_samples = unit == "samples"
    remedy = "batch.global={}" if order.sizes.is_constant else "sizes that end at {}"
    if run.model.schedule.scale == "none":
        remedy += f" scheduler.reference_batch={size} scheduler.scale=sqrt"
    return batch_advice(
        noise.estimate(),
        size,
        unit,
        least=max(run.world.size, run.model.coupling.size) if by_samples else 1,
        most=(len(lengths) if by_samples else int(lengths.sum())) // 2,
        remedy=remedy,
    )


def advice_rows(run: Run, loaded: Loaded | None) -> list[Row]:
    """Give the advice of a checkpoint that a plan goes on from; nothing of a new run."""
    if loaded is None:
        return []
    if NOISE not in loaded.parts:
        return [row("noise", NOT_MEASURED, batch_advice=None)]
    noise, feed = NoiseScale(run.config.batch.unit), run.feed(run.world)
    parts: dict[str, Stateful] = {NOISE: noise, "data": feed}
    if isinstance(sizes := run.data.order.sizes, Stateful):
        parts[SIZES] = as_part(sizes)
    restore(loaded, parts)
    text = advice_at(run, noise, feed.cursor)
    early = TOO_EARLY.format(noise.estimate().measurements, LEAST_MEASUREMENTS)
    return [row("noise", text or early, batch_advice=text)]
