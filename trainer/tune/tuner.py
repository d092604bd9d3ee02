"""Choose the size of micro-batches: of those as fast as any, the most usual for the device."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import final

from trainer.core.errors import DoesNotFitError
from trainer.core.format import size
from trainer.models.recompute import can_recompute
from trainer.plan.cut import Cost, Plan
from trainer.plan.memory import Shape, candidate_caps, largest_cap
from trainer.tune.cache import TuningCache
from trainer.tune.known_memory import TimeIsUpError, Variant
from trainer.tune.memory_limit import ASKED, MEBI, resident_growth, resident_ratio
from trainer.tune.speed import (
    LEAST_BUDGET_S,
    MOST_BUDGET_S,
    QUIET,
    TELLING_SIZES,
    Clock,
    SpeedModel,
    Stopwatch,
    Timings,
    fit_speed,
    measure,
    positions,
    rehearsal,
    time_budget,
)
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuning import Candidate, Question, Tuning

RECOMPUTED = 4 / 3
"""Time of forward, forward again and backward (twice a forward) over forward and backward."""

NEAR_BEST_TOKENS = {"cuda": 16_384, "cpu": 2048}
"""Padded tokens of a micro-batch that is near the best as a rule, where timings cannot tell."""

NEAR_BEST = 0.03
"""Steps that differ by less count as equally fast."""

NOISES = 2.0
"""Times the noise of the timings, below which a difference between steps may be noise."""

UNKNOWN_NOISE = 0.1
"""Taken for the noise of timings that could not be repeated."""

QUADRATIC_TOKENS = 2048
"""Size at which further lengths are timed, to tell attention's share."""


def tune(
    question: Question,
    cache: TuningCache | None = None,
    clock: Clock = time.perf_counter,
    meter: Clock | None = None,
) -> Tuning:
    """Find the cap, the time model and whether to recompute.

    Not collective: one rank does it, before the model is wrapped for several, and sends it to the
    others. The model, its gradients and buffers and the random generators are left bit for bit
    as they were. Activation checkpointing is weighed only where memory holds the cap down:
    elsewhere it costs a second forward and buys nothing. Where predictions and timings together
    would take more than 10 s and 2 % of the run, what is known by then decides.

    Args:
        question: what is to be tuned.
        cache: what is known already; gets what is found.
        clock: seconds that tuning takes.
        meter: seconds that a micro-batch takes; the clock's unless given.

    Raises:
        DoesNotFitError: even one sample exceeds the memory.
    """
    cache, watch = cache or TuningCache(), Stopwatch(clock, meter or clock)
    explored: list[_Explored] = []
    if question.recompute != "always":
        explored.append(_explore(Variant(question, cache.plain, watch, recompute=False), watch))
    if question.recompute == "always" or (
        question.recompute == "auto"
        and explored[0].wants_memory
        and can_recompute(question.work.model)
        and (not explored[0].rows or watch.has_room_for(0.0))
    ):
        explored.append(_explore(Variant(question, cache.recomputed, watch, recompute=True), watch))
    best, row = _best_of(explored)
    # The chosen shape itself is run, whatever the rows of the table were interpolated from.
    predicted = best.variant.best_known_under(row.max_tokens)
    cache.save()
    return _tuning_of(explored, best, row, predicted)


@final
@dataclass(frozen=True, kw_only=True)
class _Explored:
    """What was found out about one variant.

    Attributes:
        variant: with or without activation checkpointing.
        rows: caps that fit, ascending; empty when not even one sample does.
        times: of a step, by cap: in seconds, or in tokens where nothing was timed.
        cost: the time model.
        how: where that is from.
        margin: steps that differ by less count as equally fast; infinite where no choice can be
            made by time.
    """

    variant: Variant
    rows: tuple[Candidate, ...]
    times: Mapping[int, float]
    cost: Cost
    how: str
    margin: float

    @property
    def choosable(self) -> tuple[Candidate, ...]:
        """The rows that may be chosen; of a device that is not here only the largest."""
        return self.rows if self.variant.question.timed else self.rows[-1:]

    @property
    def wants_memory(self) -> bool:
        """Whether a cap that memory forbids might have been faster."""
        if not self.rows:
            return True
        largest = self.rows[-1]
        return largest.max_tokens < self.variant.question.top and _best([self])[1] is largest


def _explore(variant: Variant, watch: Stopwatch) -> _Explored:
    question = variant.question
    speed, how, margin = SpeedModel.of(question.layout.cost), "time unknown", NEAR_BEST
    fits = variant.largest_fit()
    if fits is not None and question.timed:
        speed, how, margin = _timed(variant, fits, watch)
        watch.allow(float(speed.coefficients[1]) * question.num_positions)
        fits = variant.largest_fit()
    cost = speed.cost if question.timed else question.layout.cost
    caps = () if fits is None else _doublings(min(variant.smallest_cap, fits), fits)
    plans = {cap: _plans(question, cap, cost) for cap in caps}
    # Where nothing is timed, recomputing costs what arithmetic says.
    factor = RECOMPUTED if variant.recompute and not question.timed else 1.0
    step_seconds = partial(speed.step_seconds, lockstep=question.layout.lockstep)
    times = {cap: factor * fmean(map(step_seconds, plans[cap])) for cap in caps}
    rows = tuple(
        Candidate(
            max_tokens=cap,
            predicted_bytes=variant.bytes_under(cap),
            seconds_per_step=times[cap] if question.timed else None,
            padding=_padding(plans[cap]),
            micro_batches=fmean(plan.num_micro_batches for plan in plans[cap]),
            activation_checkpointing=variant.recompute,
        )
        for cap in caps
    )
    explored = _Explored(variant=variant, rows=rows, times=times, cost=cost, how=how, margin=margin)
    if question.timed and math.isinf(margin) and len(rows) > 1:
        taken = _best([explored])[1].max_tokens
        guess = f"{how}, one size only, too slow for more: a cap of {taken:,} is a guess"
        return replace(explored, how=guess)
    return explored


def _doublings(smallest: int, largest: int) -> tuple[int, ...]:
    """List caps, each twice the one before, and the largest."""
    caps = [smallest]
    while caps[-1] * 2 < largest:
        caps.append(caps[-1] * 2)
    return tuple(dict.fromkeys((*caps, largest)))


def _timed(variant: Variant, fits: int, watch: Stopwatch) -> tuple[SpeedModel, str, float]:
    """Time what is not known yet, and learn what tensors cost in resident memory.

    Returns:
        The time model, where it is from, and by how much steps must differ to be compared.

    Raises:
        DoesNotFitError: even the smallest size ran out of memory.
    """
    facts = variant.facts
    sizes, others = _shapes_to_time(variant, fits)
    asked, how = [*sizes, *others], "timed in an earlier run"
    known = {shape: facts.seconds[shape] for shape in asked if shape in facts.seconds}
    is_enough = len({positions(shape) for shape in known}) >= min(TELLING_SIZES, len(sizes))
    if not any(shape in known for shape in sizes) or (
        facts.tries_left and (not is_enough or _is_worth_timing(variant.question, known))
    ):
        before = watch.elapsed()
        timings = _measure(variant, sizes, others, watch)
        spent = watch.elapsed() - before
        count = len(timings.seconds)
        how = f"timed {count} {'shape' if count == 1 else 'shapes'} in {spent:.1f} s"
        facts.add_timings(timings.seconds, timings.noise)
    known = {shape: facts.seconds[shape] for shape in asked if shape in facts.seconds}
    of_sizes = {shape: known.pop(shape) for shape in sizes if shape in known}
    if not of_sizes:
        raise DoesNotFitError(_does_not_fit(variant))
    speed = fit_speed(of_sizes, known)
    if len({positions(shape) for shape in (*of_sizes, *known)}) < TELLING_SIZES:
        return speed, how, math.inf
    is_repeated = math.isfinite(facts.noise)
    if facts.noise > QUIET:
        how += ", disturbed by other programs" if is_repeated else ", once each"
    return speed, how, max(NEAR_BEST, NOISES * (facts.noise if is_repeated else UNKNOWN_NOISE))


def _is_worth_timing(question: Question, known: Mapping[Shape, float]) -> bool:
    """Tell whether a run is long enough to correct the timings of a busy machine in 2 % of it."""
    rate = min(seconds / positions(shape) for shape, seconds in known.items())
    return 0.02 * rate * question.num_positions > LEAST_BUDGET_S


def _shapes_to_time(variant: Variant, fits: int) -> tuple[list[Shape], list[Shape]]:
    """Choose shapes: every size at the typical length, and one size at other lengths."""
    question = variant.question
    longest, typical = question.padded(question.longest), question.typical
    caps = _doublings(min(variant.smallest_cap, fits), fits)
    middle = min(caps, key=lambda cap: abs(cap - QUADRATIC_TOKENS))

    def shape(size: int, length: int) -> Shape:
        return Shape(max(1, min(question.most_samples, size // length)), length)

    sizes = list(dict.fromkeys(shape(cap, typical) for cap in caps))
    lengths = {longest, question.padded(typical // 4)} - {typical}
    if question.shortest == question.longest:
        lengths = set()  # attention's share is the same in every sample
    return sizes, [shape(middle, length) for length in sorted(lengths)]


def _measure(
    variant: Variant, sizes: Sequence[Shape], others: Sequence[Shape], watch: Stopwatch
) -> Timings:
    """Time shapes, and compare the memory they took with the predicted."""
    question, work = variant.question, variant.question.work
    # Predictions have taken their part of what tuning may take.
    left_s = max(LEAST_BUDGET_S, MOST_BUDGET_S - watch.elapsed())
    with (
        work.filled(),
        resident_growth(work.device) as growth,
        rehearsal(work, recompute=variant.recompute) as prepare,
    ):
        timings = measure(
            prepare,
            sizes,
            others,
            lambda rate: time_budget(rate * question.num_positions, left_s),
            watch.clock,
            watch.meter,
            patience_s=left_s,
        )
    if timings.failed is not None:
        # The least ratio that explains the failure, and so keeps clear of it.
        resident = work.resident_bytes
        failed = variant.peak(timings.failed, is_needed=True).peak_bytes - resident - 1
        variant.remember_ratio((question.limit.bytes - resident) / max(1, failed))
    else:
        peak = variant.peak(max(timings.seconds, key=positions), is_needed=True)
        variant.remember_ratio(resident_ratio(growth, peak.activations + peak.gradients))
    return timings


def _plans(question: Question, cap: int, cost: Cost) -> list[Plan]:
    """Cut the sampled global batches under a cap."""
    cut, layout = question.cut_at(cap, cost, question.alone), replace(question.layout, cost=cost)
    return [cut.cut(lengths, layout) for lengths in question.batches]


def _padding(plans: Sequence[Plan]) -> float:
    computed = sum(plan.num_positions for plan in plans)
    tokens = sum(int(plan.lengths.sum()) for plan in plans)
    return 1.0 - tokens / computed if computed else 0.0


def _best(found: Sequence[_Explored]) -> tuple[_Explored, Candidate]:
    """Choose among the rows as fast as any, within the noise of the timings.

    Of these, one that recomputes nothing, nearest to what such devices need as a rule: noise must
    not choose between sizes that it makes look different.
    """
    pool = [(one, row) for one in found for row in one.choosable]
    question = found[0].variant.question
    usual = NEAR_BEST_TOKENS.get(question.work.device.type, NEAR_BEST_TOKENS["cpu"])
    margin = max(one.margin for one in found)
    enough = (1.0 + margin) * min(one.times[row.max_tokens] for one, row in pool)
    near = [(one, row) for one, row in pool if one.times[row.max_tokens] <= enough]
    return min(
        near,
        key=lambda pair: (
            pair[1].activation_checkpointing,
            abs(math.log2(pair[1].max_tokens / usual)),
        ),
    )


def _best_of(explored: Sequence[_Explored]) -> tuple[_Explored, Candidate]:
    """Choose among all that fit.

    Raises:
        DoesNotFitError: nothing does.
    """
    found = [one for one in explored if one.rows]
    if not found:
        raise DoesNotFitError(_does_not_fit(explored[-1].variant))
    return _best(found)


def _tuning_of(
    explored: Sequence[_Explored], best: _Explored, row: Candidate, predicted: MemoryEstimate
) -> Tuning:
    """Put the choice into words and numbers."""
    variant, question = best.variant, best.variant.question
    method = [variant.facts.method, best.how, question.limit.source]
    if variant.watch.was_short:
        method.append(
            f"out of time after {variant.watch.elapsed():.0f} s: the rest scaled up from one sample"
        )
    if row.max_tokens < question.alone:
        method.insert(0, f"longer samples, of up to {question.alone:,}, are alone")
    return Tuning(
        max_tokens=row.max_tokens,
        alone=question.alone,
        activation_checkpointing=row.activation_checkpointing,
        cost=best.cost,
        predicted=predicted,
        limit_bytes=variant.limit_bytes,
        method="; ".join(method),
        candidates=tuple(
            replace(other, predicted_bytes=predicted.peak_bytes, chosen=True)
            if other is row
            else other
            for one in explored
            for other in one.rows
        ),
    )


def _does_not_fit(variant: Variant) -> str:
    question, there = variant.question, variant.limit_bytes
    sample = "" if question.longest_id is None else f" {question.longest_id}"
    waiting = question.limit.inputs
    inputs = f", {size(waiting)} for inputs" if waiting else ""
    needed = variant.peak(variant.single, is_needed=True).peak_bytes
    fits = _longest_that_fits(variant)
    remedies = ["use a smaller model"]
    if question.recompute == "never":
        remedies.insert(0, "try activation_checkpointing=true")
    if fits > 1:
        remedies.insert(0, f"shorten it, data.max_length={fits} being the longest that fits")
    if question.limit.source.startswith(ASKED):
        whole = question.limit.whole_for(needed, variant.ratio, question.work.resident_bytes)
        enough = math.ceil((whole + 1) / MEBI)  # what is left is rounded down to a byte
        remedies.insert(0, f"type accum.memory={enough}MiB or more")
    return (
        f"sample{sample} of {question.longest} tokens does not fit, even alone: a step with it "
        f"needs {size(needed)} of tensors, and {size(there)} are there "
        f"({question.limit.source}{inputs}): {', or '.join(remedies)}"
    )


def _longest_that_fits(variant: Variant) -> int:
    """Find the longest sample that fits alone, within 4 %; 0 where none does, or time is up."""
    count, longest = variant.single

    def peak(length: int) -> int:
        return variant.peak(Shape(count, length)).peak_bytes

    with suppress(TimeIsUpError):
        return largest_cap(peak, variant.limit_bytes, candidate_caps(1, longest)).cap or 0
    return 0
