"""Choose the size of micro-batches: of those as fast as any, the most usual for the device."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from trainer.core.errors import DoesNotFitError
from trainer.core.format import size
from trainer.models.recompute import can_recompute
from trainer.plan.memory import Shape, candidate_caps, largest_cap
from trainer.tune.cache import Facts, TuningCache
from trainer.tune.known_memory import NEAR_BEST, Variant
from trainer.tune.memory_limit import ASKED, MEBI, resident_growth, resident_ratio
from trainer.tune.speed import (
    COMPARED_SIZES,
    LEAST_BUDGET_S,
    MOST_BUDGET_S,
    QUIET,
    RUN_SHARE,
    Clock,
    SpeedModel,
    Stopwatch,
    fit_speed,
    measure,
    positions,
    rehearsal,
    time_budget,
)
from trainer.tune.tuning import Candidate, Question, Tuning

# With and without activation checkpointing, by `Question.recompute`
VARIANTS = {"never": (False,), "always": (True,), "auto": (False, True)}
# Time of forward, forward again and backward (twice a forward) over forward and backward
RECOMPUTED = 4 / 3
# Padded tokens of a micro-batch that is near the best as a rule, where timings cannot tell
NEAR_BEST_TOKENS = {"cuda": 16_384, "cpu": 2048}
NOISES = 2.0  # times the noise of the timings, below which a difference between steps may be noise
UNKNOWN_NOISE = 0.1  # taken for the noise of timings that could not be repeated
QUADRATIC_TOKENS = 2048  # size at which further lengths are timed, to tell attention's share


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
    variants: list[Variant] = []
    for recompute in VARIANTS[question.recompute]:
        if not variants or _may_gain_by_recomputing(variants[0]):
            facts = cache.facts(recompute=recompute)
            variants.append(_explore(Variant(question, facts, watch, recompute=recompute)))
    found = [variant for variant in variants if variant.rows]
    if not found:
        raise DoesNotFitError(_does_not_fit(variants[-1]))
    best, row = _best(found)
    # The chosen shape itself is run, whatever the rows of the table were interpolated from.
    predicted = best.peak_under(row.max_tokens)
    cache.save()
    chosen = replace(row, predicted_bytes=predicted.peak_bytes, chosen=True)
    rows = [chosen if each is row else each for variant in variants for each in variant.rows]
    return Tuning(
        max_tokens=row.max_tokens,
        alone=question.alone,
        activation_checkpointing=row.activation_checkpointing,
        cost=best.cost,
        predicted=predicted,
        limit_bytes=best.limit_bytes,
        method=_method(best, row),
        candidates=tuple(rows),
    )


def _may_gain_by_recomputing(plain: Variant) -> bool:
    """Tell whether a cap that memory forbids might have been faster."""
    if not can_recompute(plain.question.work.model):
        return False
    if not plain.rows:
        return True
    largest = plain.rows[-1]
    wants_memory = largest.max_tokens < plain.question.top and _best([plain])[1] is largest
    return wants_memory and plain.watch.has_room_for(0.0)


def _explore(variant: Variant) -> Variant:
    """Find the caps that fit, and what a step takes under each."""
    question, layout = variant.question, variant.question.layout
    speed, variant.cost = SpeedModel.of(layout.cost), layout.cost
    fits = variant.largest_fit()
    if fits is not None and question.timed:
        speed = _timed(variant, fits)
        variant.cost = speed.cost
        run_s = float(speed.coefficients[0]) * question.num_positions
        variant.watch.budget_s = max(MOST_BUDGET_S, RUN_SHARE * run_s)
        fits = variant.largest_fit()
    layout = replace(layout, cost=variant.cost)
    # Where nothing is timed, recomputing costs what arithmetic says.
    factor = RECOMPUTED if variant.recompute and not question.timed else 1.0
    for cap in () if fits is None else _doublings(min(variant.smallest_cap, fits), fits):
        cut = question.cut_at(cap, variant.cost, question.alone)
        plans = [cut.cut(lengths, layout) for lengths in question.batches]
        seconds = [speed.step_seconds(plan, lockstep=layout.lockstep) for plan in plans]
        variant.times[cap] = factor * fmean(seconds)
        computed = sum(plan.num_positions for plan in plans)
        tokens = sum(int(plan.lengths.sum()) for plan in plans)
        row = Candidate(
            max_tokens=cap,
            predicted_bytes=variant.bytes_under(cap),
            seconds_per_step=variant.times[cap] if question.timed else None,
            padding=1.0 - tokens / computed if computed else 0.0,
            micro_batches=fmean(plan.num_micro_batches for plan in plans),
            activation_checkpointing=variant.recompute,
        )
        variant.rows.append(row)
    return variant


def _doublings(smallest: int, largest: int) -> tuple[int, ...]:
    """List caps, each twice the one before, and the largest."""
    caps = [smallest]
    while caps[-1] * 2 < largest:
        caps.append(caps[-1] * 2)
    return tuple(dict.fromkeys((*caps, largest)))


def _timed(variant: Variant, fits: int) -> SpeedModel:
    """Time what is not known yet, and learn what tensors cost in resident memory.

    Raises:
        DoesNotFitError: even the smallest size ran out of memory.
    """
    facts, watch = variant.facts, variant.watch
    sizes, others = _shapes_to_time(variant, fits)
    known = _known(facts, [*sizes, *others])
    is_enough = len(set(map(positions, known))) >= min(COMPARED_SIZES, len(sizes))
    # A run that is long enough corrects the timings of a busy machine in 2 % of it.
    rate = min((seconds / positions(shape) for shape, seconds in known.items()), default=0.0)
    is_long = RUN_SHARE * rate * variant.question.num_positions > LEAST_BUDGET_S
    variant.how = "timed in an earlier run"
    if known.keys().isdisjoint(sizes) or (facts.tries_left and (is_long or not is_enough)):
        before = watch.elapsed()
        count = _measure(variant, sizes, others)
        shapes = "shape" if count == 1 else "shapes"
        variant.how = f"timed {count} {shapes} in {watch.elapsed() - before:.1f} s"
    of_sizes, of_others = _known(facts, sizes), _known(facts, others)
    if not of_sizes:
        raise DoesNotFitError(_does_not_fit(variant))
    is_repeated = math.isfinite(facts.noise)
    noise = facts.noise if is_repeated else UNKNOWN_NOISE
    variant.margin = max(NEAR_BEST, NOISES * noise)
    if len(set(map(positions, of_sizes | of_others))) < COMPARED_SIZES:
        variant.margin = math.inf
    elif facts.noise > QUIET:
        variant.how += ", disturbed by other programs" if is_repeated else ", once each"
    return fit_speed(of_sizes, of_others)


def _known(facts: Facts, shapes: Sequence[Shape]) -> dict[Shape, float]:
    return {shape: facts.seconds[shape] for shape in shapes if shape in facts.seconds}


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


def _measure(variant: Variant, sizes: Sequence[Shape], others: Sequence[Shape]) -> int:
    """Time shapes, and compare the memory they took with the predicted; gives their number."""
    question, work, facts = variant.question, variant.question.work, variant.facts
    watch = variant.watch
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
        # The least ratio that explains the failure, and so stays clear of it.
        resident = work.resident_bytes
        failed = variant.peak(timings.failed, is_needed=True).peak_bytes - resident - 1
        ratio = (question.limit.bytes - resident) / max(1, failed)
    else:
        peak = variant.peak(max(timings.seconds, key=positions), is_needed=True)
        ratio = resident_ratio(max(growth, default=0), peak.activations + peak.gradients)
    facts.ratio = max(ratio, facts.ratio)
    facts.add_timings(timings.seconds, timings.noise)
    return len(timings.seconds)


def _best(variants: Sequence[Variant]) -> tuple[Variant, Candidate]:
    """Choose among the rows as fast as any, within the noise of the timings.

    Of these, one that recomputes nothing, nearest to what such devices need as a rule: noise must
    not choose between sizes that it makes look different.
    """
    question = variants[0].question
    usual = NEAR_BEST_TOKENS.get(question.work.device.type, NEAR_BEST_TOKENS["cpu"])
    # Of a device that is not here, only the largest cap may be chosen.
    first = 0 if question.timed else -1
    pool = [(variant, row) for variant in variants for row in variant.rows[first:]]
    margin = max(variant.margin for variant in variants)
    enough = (1.0 + margin) * min(variant.times[row.max_tokens] for variant, row in pool)
    return min(
        [(variant, row) for variant, row in pool if variant.times[row.max_tokens] <= enough],
        key=lambda at: (at[0].recompute, abs(math.log2(at[1].max_tokens / usual))),
    )


def _method(best: Variant, row: Candidate) -> str:
    """Say how the choice is known, for a person to read."""
    question, watch, how = best.question, best.watch, best.how
    if math.isinf(best.margin) and len(best.rows) > 1:
        how += f", one size only, too slow for more: a cap of {row.max_tokens:,} is a guess"
    method = [best.facts.method, how, question.limit.source]
    if watch.was_short:
        spent = f"{watch.elapsed():.0f} s"
        method.append(f"out of time after {spent}: the rest scaled up from one sample")
    if row.max_tokens < question.alone:
        method.insert(0, f"longer samples, of up to {question.alone:,}, are alone")
    return "; ".join(method)


def _does_not_fit(variant: Variant) -> str:
    """Say what does not fit, and what would, within 4 %."""
    question, there = variant.question, variant.limit_bytes
    sample = "" if question.longest_id is None else f" {question.longest_id}"
    waiting = question.limit.inputs
    inputs = f", {size(waiting)} for inputs" if waiting else ""
    count, longest = variant.single
    needed = variant.peak(variant.single).peak_bytes
    fits = largest_cap(
        lambda length: variant.peak(Shape(count, length)).peak_bytes,
        there,
        candidate_caps(1, longest),
    )
    remedies = ["use a smaller model"]
    if question.recompute == "never":
        remedies.insert(0, "try activation_checkpointing=true")
    if fits is not None and fits > 1:
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
