"""Choose the size of micro-batches: of those as fast as any, the most usual for the device.

What fits is found by predicted peaks; what is fast, by a few timings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import final

import numpy as np

from trainer.core import signals
from trainer.core.errors import ConfigError
from trainer.core.format import plural
from trainer.models.recompute import can_recompute
from trainer.plan.cut import Cost, Plan
from trainer.plan.memory import (
    Shape,
    candidate_caps,
    corner_shapes,
    largest_cap,
    largest_shapes,
)
from trainer.tune.cache import Measurements, TuningCache
from trainer.tune.explain import NEAR_BEST, describe_choice, refuse
from trainer.tune.memory_limit import resident_growth, resident_ratio
from trainer.tune.predict import CannotRunFake, Predictor
from trainer.tune.speed import (
    COMPARED_SIZES,
    QUIET,
    Clock,
    SpeedModel,
    Stopwatch,
    Timings,
    fit_speed,
    measure,
    positions,
    rehearsal,
    speed_of,
)
from trainer.tune.tensors import MemoryEstimate
from trainer.tune.tuning import NEAR_BEST_TOKENS, Candidate, Tuning, TuningRequest
from trainer.tune.workload import Workload

# With and without activation checkpointing, by `Question.recompute`
VARIANTS = {False: (False,), True: (True,), "auto": (False, True)}
# Time of forward, forward again and backward (twice a forward) over forward and backward
RECOMPUTED = 4 / 3
# Taken for the noise of timings that could not be repeated: beside another program a size seemed up
# to 1.44 times as slow as another that was slower.
UNKNOWN_NOISE = 0.5
EXTRAPOLATED = 4096, 8192  # positions of the runs that tell of larger ones, for another machine
TINY = 16  # parts of a typical sample; two (of one, a graph more is compiled) are all fixed cost
QUADRATIC_TOKENS = 2048  # size at which further lengths are timed, to tell attention's share
# What timing may take: a share of the run, within bounds in seconds
RUN_SHARE, LEAST_BUDGET_S, MOST_BUDGET_S = 0.02, 1.5, 10.0


def tune(
    request: TuningRequest,
    cache: TuningCache | None = None,
    clock: Clock = time.perf_counter,
    meter: Clock | None = None,
) -> Tuning:
    """Find the cap, the time model and whether to recompute.

    Not collective: one rank does it, before the model is wrapped for several, and sends it to the
    others. The model, its gradients and buffers and the random generators are left bit for bit
    as they were. Activation checkpointing is weighed only where memory holds the cap down:
    elsewhere it costs a second forward and buys nothing. Takes some ten predictions, and for
    timings 2 % of the run, but at least 1.5 s and at most 10 s; twice that beside other programs.

    Args:
        request: what is to be tuned.
        cache: what is known already; gets what is found.
        clock: seconds that timing takes, which has a budget.
        meter: seconds that a micro-batch takes; the clock's unless given.

    Raises:
        DoesNotFitError: even one sample exceeds the memory.
    """
    cache, meter = cache or TuningCache(), meter or clock
    variants: list[MemoryVariant] = []
    for recompute in VARIANTS[request.recompute]:
        if not variants or _may_gain_by_recomputing(variants[0]):
            variants.append(MemoryVariant(request, cache.facts[recompute], clock, meter, recompute))
            variants[-1].explore()
    found = [variant for variant in variants if variant.rows]
    if not found:
        refuse(variants[-1])
    best, row = _best(found)
    fastest_s = min(min(variant.times.values()) for variant in found)
    # The chosen shapes themselves are run, whatever the rows of the table were interpolated from.
    chosen = replace(row, predicted_bytes=best.peak_under(row.max_tokens).peak_bytes, chosen=True)
    predicted = best.peak_of(best.request.plans_under(row.max_tokens, best.cost))
    cache.save()
    return Tuning(
        max_tokens=row.max_tokens,
        single_sample_cap=request.single_sample_cap,
        activation_checkpointing=row.activation_checkpointing,
        cost=best.cost,
        predicted=predicted,
        limit_bytes=best.limit_bytes,
        method=describe_choice(best, row, fastest_s),
        candidates=tuple(
            chosen if each is row else each for variant in variants for each in variant.rows
        ),
    )


def _may_gain_by_recomputing(plain: MemoryVariant) -> bool:
    """Tell whether a cap that memory forbids might have been faster."""
    if not can_recompute(plain.request.work.model):
        return False
    if not plain.rows:
        return True
    largest = plain.rows[-1]
    return largest.max_tokens < plain.request.top and _best([plain])[1] is largest


def _best(variants: Sequence[MemoryVariant]) -> tuple[MemoryVariant, Candidate]:
    """Choose among the rows as fast as any, within the noise of the timings.

    Of these, one that recomputes nothing, nearest to what such devices need as a rule: noise must
    not choose between sizes that it makes look different.
    """
    request = variants[0].request
    usual = NEAR_BEST_TOKENS[request.work.device.type]
    # Where nothing is timed, only the largest cap may be chosen.
    first = 0 if request.timed else -1
    pool = [(variant, row) for variant in variants for row in variant.rows[first:]]
    margin = max(variant.margin for variant in variants)
    enough = (1.0 + margin) * min(variant.times[row.max_tokens] for variant, row in pool)
    return min(
        [(variant, row) for variant, row in pool if variant.times[row.max_tokens] <= enough],
        key=lambda at: (at[0].recompute, abs(math.log2(at[1].max_tokens / usual))),
    )


def _doublings(smallest: int, largest: int) -> tuple[int, ...]:
    """List caps, each twice the one before, and the largest."""
    caps = [min(smallest, largest)]
    while caps[-1] * 2 < largest:
        caps.append(caps[-1] * 2)
    return tuple(dict.fromkeys((*caps, largest)))


@final
@dataclass
class MemoryVariant:
    """What is found out with, or without, activation checkpointing."""

    request: TuningRequest
    facts: Measurements  # known already; gets what is found
    clock: Clock  # seconds that timing takes
    meter: Clock  # seconds that a micro-batch takes
    recompute: bool
    predictor: Predictor | None = None  # made when the facts lack a shape
    caps_run: dict[int, int] = field(default_factory=dict)  # predicted bytes
    rows: list[Candidate] = field(default_factory=list)  # caps that fit, ascending
    times: dict[int, float] = field(default_factory=dict)  # of a step, by cap; in tokens if untimed
    cost: Cost = field(default_factory=Cost)
    how: str = "time unknown"  # where times and cost are from
    margin: float = NEAR_BEST  # infinite where no choice can be made by time

    @property
    def ratio(self) -> float:
        """Resident bytes per byte of tensors; of a machine that is not here nobody knows."""
        return self.facts.ratio if self.request.timed else 1.0

    @property
    def limit_bytes(self) -> int:
        """What tensors may take, as far as is known."""
        return self.request.limit.for_tensors(self.ratio, self.request.work.resident_bytes)

    def explore(self) -> None:
        """Find the caps that fit, and what a step takes under each."""
        request, layout = self.request, self.request.layout
        self.cost = layout.cost
        speed, is_known = speed_of(self.cost), self.cost.seconds_per_token is not None
        fits = self.largest_fit()
        if fits is not None and request.timed:
            speed = self.timed_speed(fits)
            self.cost = speed.cost
            fits = self.largest_fit()
        # Where nothing is timed, recomputing costs what arithmetic says.
        factor = RECOMPUTED if self.recompute and not request.timed else 1.0
        # As long as the same corner is the worst, peaks are affine in the cap.
        caps, peaks = zip(*sorted(self.caps_run.items()), strict=True)
        for cap in () if fits is None else _doublings(request.smallest_cap, fits):
            plans = request.plans_under(cap, self.cost)
            seconds = [speed.step_seconds(plan, lockstep=layout.lockstep) for plan in plans]
            self.times[cap] = factor * fmean(seconds)
            computed = sum(plan.num_positions for plan in plans)
            tokens = sum(int(plan.lengths.sum()) for plan in plans)
            self.rows.append(
                Candidate(
                    max_tokens=cap,
                    predicted_bytes=int(np.interp(cap, caps, peaks)),
                    seconds_per_step=self.times[cap] if is_known or request.timed else None,
                    padding=1.0 - tokens / computed if computed else 0.0,
                    micro_batches=fmean(plan.num_micro_batches for plan in plans),
                    activation_checkpointing=self.recompute,
                )
            )

    def largest_fit(self) -> int | None:
        """Find the largest cap that fits; None when not even one sample does."""
        request, limit = self.request, self.limit_bytes
        if request.as_needed:  # where a prediction saved matters more than the table's first rows
            most = self.peak_under(request.top)
            self.caps_run[0] = most.peak_bytes - most.activations
            if most.peak_bytes <= limit:
                return request.top
        caps = candidate_caps(request.smallest_cap, request.top)
        fits = largest_cap(self._bytes_under, limit, caps)
        if fits is None and self.peak(request.single).peak_bytes <= limit:
            # Many short samples may take more than the longest one, which is alone then.
            least = request.padded(request.shortest)
            caps = candidate_caps(least, request.smallest_cap)
            fits = largest_cap(self._bytes_under, limit, caps)
        return fits

    def _bytes_under(self, cap: int) -> int:
        return self.peak_under(cap).peak_bytes

    def peak_under(self, cap: int) -> MemoryEstimate:
        """Predict the peak of a step under a cap: that of its worst corner."""
        worst = max(map(self.peak, self.corners(cap)), key=lambda peak: peak.peak_bytes)
        self.caps_run[cap] = worst.peak_bytes
        return worst

    def corners(self, cap: int) -> tuple[Shape, ...]:
        """Name the shapes that can be worst under a cap; the first has the longest samples."""
        q = self.request
        shapes = corner_shapes(cap, q.padded(q.longest), q.padded(q.shortest), q.most_samples)
        # What is not run here is estimated: models whose short samples need more are few.
        return shapes[:1] if q.as_needed else shapes

    def peak_of(self, plans: Sequence[Plan]) -> MemoryEstimate:
        """Predict the highest peak of steps that are cut so.

        For a machine that is not here that of as many positions, in samples of the greatest length.
        """
        shapes = largest_shapes(plans)
        if not self.request.as_needed:
            return max(map(self.peak, shapes), key=lambda peak: peak.peak_bytes)
        longest = self.request.padded(self.request.longest)
        return self.peak(Shape(-(-positions(shapes[0]) // longest), longest))

    def peak(self, shape: Shape) -> MemoryEstimate:
        """Predict the peak of a step whose largest micro-batch has this shape.

        Raises:
            ConfigError: the model is to be sharded and needs values.
        """
        request, peaks = self.request, self.facts.peaks
        few, many = (Shape(n // shape.length, shape.length) for n in EXTRAPOLATED)
        if request.as_needed and 0 < few.num_samples < many.num_samples < shape.num_samples:
            # A loss in chunks runs as many operators as there are positions: two runs, and a line.
            one, two = self.peak(few), self.peak(many)
            slope = (two.activations - one.activations) / (many.num_samples - few.num_samples)
            more = int(slope * (shape.num_samples - many.num_samples))
            grown = two.activations + more
            return replace(two, peak_bytes=two.peak_bytes + more, activations=grown)
        if shape not in peaks:
            signals.check()
            if self.predictor is None:
                self.predictor = Predictor(request.work, request.single, recompute=self.recompute)
            try:
                peaks[shape] = self.predictor(shape)
            except CannotRunFake as answer:
                raise ConfigError(
                    f"accum=auto: the memory of shards is not known: {answer}; type "
                    "accum=budget accum.max_tokens=N, or accum=fixed accum.micro=N"
                ) from answer
            self.facts.method = self.predictor.method
        return peaks[shape]

    def timed_speed(self, fits: int) -> SpeedModel:
        """Time what is not known yet, and learn what tensors cost in resident memory.

        Raises:
            DoesNotFitError: even the smallest size ran out of memory.
        """
        facts, known = self.facts, self.facts.seconds
        sizes, others = self._shapes_to_time(fits)
        # A run that is long enough corrects the timings of a busy machine in 2 % of it.
        rate = min((seconds / positions(shape) for shape, seconds in known.items()), default=0.0)
        is_long = self.budget_s(rate) > LEAST_BUDGET_S
        self.how = "timed in an earlier run"
        if known.keys().isdisjoint(sizes) or (facts.noise > QUIET and is_long):
            self._measure(sizes, others)
        of_sizes = {shape: known[shape] for shape in sizes if shape in known}
        of_others = {shape: known[shape] for shape in others if shape in known}
        if not of_sizes:
            refuse(self)
        noise = UNKNOWN_NOISE if math.isinf(facts.noise) else facts.noise
        self.margin = max(NEAR_BEST, noise)
        timed = set(map(positions, of_sizes | of_others))
        if sum(size >= positions(sizes[0]) for size in timed) < COMPARED_SIZES:
            self.margin = math.inf
        elif QUIET < facts.noise < math.inf:
            self.how += ", disturbed by other programs"
        return fit_speed(of_sizes, of_others)

    def budget_s(self, rate: float) -> float:
        """Give the seconds that timing may take, by those that a position takes."""
        run_s = rate * self.request.num_positions
        return min(max(RUN_SHARE * run_s, LEAST_BUDGET_S), MOST_BUDGET_S)

    def _shapes_to_time(self, fits: int) -> tuple[list[Shape], list[Shape]]:
        """Choose shapes: sizes at the typical length, one at others, and a tiny one: fixed cost."""
        request, typical = self.request, self.request.typical
        caps = _doublings(request.smallest_cap, fits)
        middle = min(caps, key=lambda cap: abs(cap - QUADRATIC_TOKENS))

        def shape(size: int, length: int) -> Shape:
            return Shape(max(1, min(request.most_samples, size // length)), length)

        sizes = list(dict.fromkeys(shape(cap, typical) for cap in caps))
        if request.shortest == request.longest:
            return sizes, []  # attention's share is the same in every sample, and so is the cut
        tiny, quarter = (request.padded(max(request.shortest, typical // n)) for n in (TINY, 4))
        lengths = sorted({quarter, request.padded(request.longest)} - {typical})
        return sizes, [shape(min(fits, 2 * tiny), tiny), *(shape(middle, n) for n in lengths)]

    def _measure(self, sizes: Sequence[Shape], others: Sequence[Shape]) -> None:
        """Time shapes, and compare the memory they took with the predicted."""
        request, work, facts = self.request, self.request.work, self.facts
        started = self.clock()
        with work.filled():
            timings, growth = self._time(work, sizes, others)
            if work.compiled and timings.failed is None:
                self._compare_uncompiled(timings.seconds)
        if timings.failed is not None:
            # The least ratio that explains the failure, and so stays clear of it.
            resident = work.resident_bytes
            failed = self.peak(timings.failed).peak_bytes - resident - 1
            facts.ratio = max(facts.ratio, (request.limit.bytes - resident) / max(1, failed))
        elif not work.compiled:
            peak = self.peak(max(timings.seconds, key=positions))
            tensors = peak.activations + peak.gradients
            facts.add_ratio(resident_ratio(growth, tensors, work.device.type))
        facts.add_timings(timings.seconds, timings.noise)
        shapes = plural(len(timings.seconds), "shape")
        self.how = f"timed {shapes} in {self.clock() - started:.1f} s"

    def _compare_uncompiled(self, compiled: Mapping[Shape, float]) -> None:
        """Time the largest shape that fits uncompiled, and compare its memory.

        What a compiler takes itself says nothing of tensors.
        """
        request, facts = self.request, self.facts
        work = replace(request.work, compiled=False)
        predict = Predictor(work, request.single, recompute=self.recompute)
        for shape in sorted(compiled, key=positions, reverse=True):
            peak = predict(shape)
            if peak.peak_bytes <= self.limit_bytes:
                timings, growth = self._time(work, [shape], [])
                facts.compiled_time = compiled[shape] / timings.seconds.get(shape, math.inf)
                tensors = peak.activations + peak.gradients
                facts.add_ratio(resident_ratio(growth, tensors, work.device.type))
                return

    def _time(
        self, work: Workload, sizes: Sequence[Shape], others: Sequence[Shape]
    ) -> tuple[Timings, int]:
        """Time shapes; gives the bytes too that memory rose by, 0 where nobody knows."""
        stopwatch, patience_s = Stopwatch(self.clock), MOST_BUDGET_S
        with (
            resident_growth(work.device) as growth,
            rehearsal(work, recompute=self.recompute, stopwatch=stopwatch) as prepare,
        ):
            timings = measure(
                prepare, sizes, others, self.budget_s, stopwatch, self.meter, patience_s=patience_s
            )
        if work.compiled:
            self.facts.compile_s = stopwatch.stopped_s / max(1, len(timings.seconds))
        return timings, max(growth, default=0)
