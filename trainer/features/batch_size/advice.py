"""Say in words whether a larger or a smaller global batch would pay, by the gradient noise scale.

To the same loss, at a noise scale N and a batch of B (McCandlish et al. 2018, 1812.06162, eq. 2.7):

    steps = fewest steps x (1 + N / B)          samples = fewest samples x (1 + B / N)
"""

from __future__ import annotations

import math

from trainer.assemble.run import Run
from trainer.assemble.step import SIZES
from trainer.checkpoint.state import restore
from trainer.checkpoint.store import Loaded
from trainer.core.format import short
from trainer.core.rows import Row, row
from trainer.core.stateful import Stateful, as_part
from trainer.features.batch_size.noise_scale import LEAST_MEASUREMENTS, NoiseEstimate, NoiseScale
from trainer.plan.order import Cursor

NOISE = "noise"  # the part of a checkpoint that holds the estimate
# Times the batch of now: the law is no better than that.
LARGEST_CHANGE = 8
NOT_MEASURED = (
    "no gradient noise scale was measured in this run, so that nothing is known of other batches: "
    "train with log.noise_scale=auto"
)
TOO_EARLY = (
    "the gradient noise scale was measured {} of the {} times that advice on the batch takes: go "
    "on with the run, or measure more often, every N steps, with a lower log.noise_scale=N"
)


def advice_at(run: Run, noise: NoiseScale, at: Cursor) -> str | None:
    """Say whether another global batch would pay than at a position of a run."""
    order, lengths = run.data.order, run.data.lengths
    size, unit = order.size_of(at), run.config.batch.unit
    least, epoch = max(run.world.size, run.model.coupling.size), len(lengths)
    if unit == "tokens":
        least, epoch = 1, int(lengths.sum())
    remedy = "sizes that end at {}"
    if order.sizes.is_constant:
        remedy = "batch.global={}"
    if run.model.schedule.scale == "none":
        remedy += f" scheduler.reference_batch={size} scheduler.scale=sqrt"
    found = noise.estimate()
    return batch_advice(found, size, unit, least=least, most=epoch // 2, remedy=remedy)


def saved_advice(run: Run, loaded: Loaded) -> Row:
    """Say the same of a checkpoint, or why nothing can be said."""
    if NOISE not in loaded.parts:
        return row("noise", NOT_MEASURED, batch_advice=None)
    noise, feed = NoiseScale(run.config.batch.unit), run.feed(run.world)
    parts: dict[str, Stateful] = {NOISE: noise, "data": feed}
    if isinstance(sizes := run.data.order.sizes, Stateful):
        parts[SIZES] = as_part(sizes)
    restore(loaded, parts)
    text = advice_at(run, noise, feed.cursor)
    early = TOO_EARLY.format(noise.estimate().measurements, LEAST_MEASUREMENTS)
    return row("noise", text or early, batch_advice=text)


def batch_advice(
    noise: NoiseEstimate, batch: int, unit: str, *, least: int, most: int, remedy: str
) -> str | None:
    """Say whether another global batch would pay, and what to type; None where too little is known.

    The noise was measured at `batch`. No batch is advised below `least`, such as the number of
    ranks, or above `most`, half an epoch. `remedy` is what to type, with `{}` for the batch.
    """
    if noise.measurements < LEAST_MEASUREMENTS:
        return None
    low, high = short(noise.low), short(noise.high)
    around = f"{low} to {high}" if noise.high < math.inf else f"{low} or more"
    value = f"{around} {unit}, not settled"
    if noise.is_precise:
        value = f"about {short(noise.scale)} {unit} ({around})"
    first = f"the gradient noise scale was {value}; the global batch is {batch:,}"
    scale = noise.scale
    # The end of what it may be that is nearer to the batch counts.
    if not noise.is_precise:
        if noise.low <= batch <= noise.high:
            return f"{first}. That is too uncertain to advise another batch: a longer run may tell"
        scale = noise.low if noise.low > batch else noise.high
    ratio = min(max(scale / batch, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
    factor = 2 ** int(abs(math.log2(ratio)))
    if factor == 1:
        return f"{first}, which is a fair one: {_needs(scale, batch, 2 * batch, unit)}"
    if scale > batch:
        other, pays = max(batch, min(batch * factor, most)), "where more ranks share a step"
        bound = f"larger one would pay, but none above {most:,}, half an epoch, is advised"
    else:
        other, pays = min(batch, max(batch // factor, least)), f"where {unit} take the time"
        bound = f"smaller one would pay, but {least:,} is the least for ranks and groups"
    if other == batch:
        return f"{first}. A {bound}"
    needs = _needs(scale, batch, other, unit)
    return f"{first}. {needs}, which pays {pays}: try {remedy.format(other)}"


def _needs(scale: float, batch: int, other: int, unit: str) -> str:
    """Write what another batch needs to the same loss, as multiples."""
    steps = (1 + scale / other) / (1 + scale / batch)
    samples = steps * other / batch
    return f"{other:,} would by estimate need {_times(steps, 'steps')} and {_times(samples, unit)}"


def _times(multiple: float, what: str) -> str:
    """Write a multiple: `2.2x fewer steps`."""
    if multiple < 1:
        return f"{1 / multiple:.1f}x fewer {what}"
    return f"{multiple:.1f}x more {what}"
