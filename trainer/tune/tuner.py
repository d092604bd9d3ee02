"""Choose the size of micro-batches: the fastest that fits or, within their scatter, the most usual.

What fits is found by predicted peaks; what is fast, by a few timings.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from operator import attrgetter
from statistics import fmean
from typing import final

from trainer.core import signals
from trainer.core.errors import ConfigError
from trainer.core.format import plural
from trainer.models.recompute import can_recompute
from trainer.plan.cut import Cost, Plan
from trainer.plan.memory import Shape, candidate_caps, largest_shapes
from trainer.tune.cache import Measurements, TuningCache
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.predict import CannotRunFake, Predictor
from trainer.tune.request import Candidate, Tuning, TuningRequest, does_not_fit, usual_cap
from trainer.tune.speed import NEAR_BEST, Clock, SpeedModel, fit_speed, measure, rehearsal, speed_of
from trainer.tune.workload import Workload, restoring

# With and without activation checkpointing, by `TuningRequest.recompute`
VARIANTS = {False: (False,), True: (True,), "auto": (False, True)}
# Time of forward, forward again and backward (twice a forward) over forward and backward
RECOMPUTED = 4 / 3
ON_LINE = 2048, 4096  # positions of the runs whose peaks the line goes through
BELIEVED_SHARE = 0.8  # share of the memory below which the line alone is believed
# Parts of a typical sample; two (of one, a graph more is compiled) are all fixed cost
TINY_PARTS = 16
QUADRATIC_TOKENS = 2048  # size at which further lengths are timed, to tell attention's share
# What timing may take: a share of the run, within bounds in seconds
RUN_SHARE, LEAST_BUDGET_S, MOST_BUDGET_S = 0.02, 1.5, 5.0
SCATTERED = 0.1  # scatter above which timings of an earlier run are made anew


def tune(
    request: TuningRequest,
    cache: TuningCache | None = None,
    clock: Clock = time.perf_counter,
    meter: Clock | None = None,
) -> Tuning:
    """Find the cap, the time model and whether to recompute.

    Not collective: one rank does it, before the model is wrapped for several, and sends it to the
    others. The model, its gradients and buffers and the random generators are left bit for bit as
    they were. Activation checkpointing is weighed only where memory holds the cap down: elsewhere
    it costs a second forward and buys nothing. Takes some four predictions, and for timings 2 % of
    the run, but at least 1.5 s and at most 5 s. `clock` times what has a budget, and `meter` a
    micro-batch.
    """
    cache, meter = cache or TuningCache(), meter or clock
    variants: list[MemoryVariant] = []
    for recompute in VARIANTS[request.recompute]:
        if not variants or _may_gain_by_recomputing(variants[0]):
            variants.append(MemoryVariant(request, cache.facts[recompute], clock, meter, recompute))
            variants[-1].explore()
    while found := [*filter(attrgetter("rows"), variants)]:
        best, row = _best(found)
        predicted = best.peak_of(request.plans_under(row.max_tokens, best.cost))
        if best.fits(predicted):
            break
        best.leave_out(row)  # its plans need more than the longest samples do
    if not found:
        last = variants[-1]
        raise does_not_fit(request, last.limit_bytes, last.peak)
    cache.save()
    fastest_s = min(min(variant.times.values()) for variant in found)
    choice, method = _described(best, row, fastest_s)
    candidates = list[Candidate]()
    for variant in variants:
        for each in variant.rows:
            candidates.append(replace(each, chosen=each is row))
    return Tuning(
        max_tokens=row.max_tokens,
        single_sample_cap=request.single_sample_cap,
        activation_checkpointing=row.activation_checkpointing,
        cost=best.cost,
        predicted=predicted,
        limit_bytes=best.limit_bytes,
        method=method,
        choice=choice,
        candidates=tuple(candidates),
    )


def predict_stated(
    work: Workload, shapes: Sequence[Shape], cache: TuningCache, *, recompute: bool
) -> MemoryEstimate:
    """Predict the peak of steps with such micro-batches, which nothing tunes."""
    peaks = cache.facts[recompute].peaks
    if unknown := [*filterfalse(peaks.__contains__, shapes)]:
        # One that the run has, not one sample alone: statistics over samples need two.
        smallest = min(shapes, key=lambda shape: shape.num_samples)
        with restoring(work.model.module, work.model.objective):
            predictor = Predictor(work, smallest, recompute=recompute)
            peaks.update({shape: predictor(shape) for shape in unknown})
        cache.save()
    return max(map(peaks.__getitem__, shapes), key=lambda peak: peak.peak_bytes)


def _may_gain_by_recomputing(plain: MemoryVariant) -> bool:
    """Tell whether a cap that memory forbids might have been faster."""
    if not can_recompute(plain.request.work.model.module):
        return False
    if not plain.rows:
        return True
    largest = plain.rows[-1]
    return largest.max_tokens < plain.request.top and _best([plain])[1] is largest


def _best(variants: Sequence[MemoryVariant]) -> tuple[MemoryVariant, Candidate]:
    """Take the fastest row; of those in its scatter, what recomputes least and is most usual."""
    request = variants[0].request
    usual = usual_cap(request.work.model.device)
    pool = list[tuple[float, MemoryVariant, Candidate]]()
    for variant in variants:
        rows = variant.rows
        # Where nothing is timed, only the largest cap may be chosen.
        if not request.timed:
            rows = rows[-1:]
        for row in rows:
            pool.append((variant.times[row.max_tokens], variant, row))
    scatter = max(NEAR_BEST, *(variant.scatter for variant in variants))
    enough = (1.0 + scatter) * min(time for time, *_ in pool)
    near_best = list[tuple[MemoryVariant, Candidate]]()
    for seconds, variant, row in pool:
        if seconds <= enough:
            near_best.append((variant, row))
    return min(
        near_best,
        # In octaves: half of the usual cap is as far from it as twice that.
        key=lambda each: (each[0].recompute, abs(math.log2(each[1].max_tokens / usual))),
    )


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
    rows: list[Candidate] = field(default_factory=list)  # caps that fit, ascending
    times: dict[int, float] = field(default_factory=dict)  # of a step, by cap; in tokens if untimed
    speed: SpeedModel = field(default_factory=lambda: speed_of(Cost()))
    how: str = "time unknown"  # where times and cost are from
    scatter: float = 0.0  # of the timings; infinite where they cannot be compared

    @property
    def cost(self) -> Cost:
        """The time model of the cuts."""
        return self.speed.cost if self.request.timed else self.request.layout.cost

    @property
    def limit_bytes(self) -> int:
        """What tensors may take: less than where memory ran out for real."""
        if self.facts.failed_bytes is None:
            return self.request.limit.bytes
        return min(self.request.limit.bytes, self.facts.failed_bytes - 1)

    def fits(self, peak: MemoryEstimate) -> bool:
        """Tell whether there is memory for a peak and what allocating it costs."""
        return self.request.limit.with_overhead(peak) <= self.limit_bytes

    def explore(self) -> None:
        """Find the caps that fit, and what a step takes under each."""
        self.speed = speed_of(self.request.layout.cost)
        fits = self.largest_fit()
        if fits is not None and self.request.timed:
            self.speed = self.timed_speed(fits)
            fits = self.largest_fit()
        if fits is not None:
            self.rows = [*map(self.row, self.caps_up_to(fits))]

    def caps_up_to(self, largest: int) -> tuple[int, ...]:
        """List caps, each twice the one before, and the largest."""
        return candidate_caps(min(self.request.smallest_cap, largest), largest, ratio=2.0)

    def row(self, cap: int) -> Candidate:
        """Work out what a step takes under a cap, in the mean of the sampled batches."""
        request, lockstep = self.request, self.request.layout.lockstep
        plans = request.plans_under(cap, self.cost)
        # Where nothing is timed, recomputing costs what arithmetic says.
        factor = RECOMPUTED if self.recompute and not request.timed else 1.0
        seconds = factor * fmean(self.speed.step_seconds(plan, lockstep=lockstep) for plan in plans)
        self.times[cap] = seconds
        computed, tokens, padding = 0, 0, 0.0
        for plan in plans:
            computed += plan.num_positions
            tokens += int(plan.lengths.sum())
        if computed:
            padding = 1.0 - tokens / computed
        seconds_per_step: float | None = seconds
        # Without a scale to seconds the model counts in tokens.
        if self.cost.seconds_per_token is None:
            seconds_per_step = None
        return Candidate(
            max_tokens=cap,
            predicted_bytes=self.estimate(cap).peak_bytes,
            seconds_per_step=seconds_per_step,
            padding=padding,
            micro_batches=fmean(plan.num_micro_batches for plan in plans),
            activation_checkpointing=self.recompute,
        )

    def leave_out(self, row: Candidate) -> None:
        """Offer smaller caps alone: of the rows or, below them all, half of the least."""
        self.rows = self.rows[: self.rows.index(row)]
        if not self.rows and row.max_tokens > 1:
            self.rows = [self.row(row.max_tokens // 2)]

    def largest_fit(self) -> int | None:
        """Find the largest cap that fits; None when not even one sample does.

        Peaks are affine in the number of samples once these outweigh the update, and convex before.
        A line through two of them tells the largest that fits, which is then run, where memory is
        near its end, and is one more point of the line.
        """
        request = self.request
        caps = candidate_caps(request.smallest_cap, request.top)
        known = {request.fullest(min(max(size, caps[0]), caps[-1])) for size in ON_LINE}
        if len(known) == 1:
            known = {request.fullest(caps[0]), request.fullest(caps[-1])}
        for shape in known:
            self.peak(shape)
        while True:
            largest: int | None = None
            for cap in caps:
                if self.fits(self.estimate(cap)):
                    largest = cap
            tried = largest or caps[0]
            shape = request.fullest(tried)
            believed = BELIEVED_SHARE * self.limit_bytes
            is_far = largest == request.top and self.estimate(tried).peak_bytes < believed
            if shape in self.facts.peaks or is_far:
                return largest
            self.peak(shape)

    def estimate(self, cap: int) -> MemoryEstimate:
        """Give the peak of as many of the longest samples as a cap allows, run or on the line."""
        shape, peaks = self.request.fullest(cap), self.facts.peaks
        if shape in peaks:
            return peaks[shape]
        counts = list[int]()
        for count, length in peaks:
            if length == shape.length:
                counts.append(count)
        counts.sort()
        # The two known peaks around it or, beyond them all, the nearest two.
        place = min(max(bisect(counts, shape.num_samples), 1), len(counts) - 1)
        low = peaks[Shape(counts[place - 1], shape.length)]
        high = peaks[Shape(counts[place], shape.length)]
        slope = (high.peak_bytes - low.peak_bytes) / (counts[place] - counts[place - 1])
        more = max(-high.activations, int(slope * (shape.num_samples - counts[place])))
        peak_bytes, activations = high.peak_bytes + more, high.activations + more
        return replace(high, peak_bytes=peak_bytes, activations=activations)

    def peak_of(self, plans: Sequence[Plan]) -> MemoryEstimate:
        """Predict the highest peak of steps that are cut so."""
        return max(map(self.peak, largest_shapes(plans)), key=lambda peak: peak.peak_bytes)

    def peak(self, shape: Shape) -> MemoryEstimate:
        """Predict the peak of a step whose largest micro-batch has this shape."""
        request, peaks = self.request, self.facts.peaks
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
        """Time what is not known yet."""
        facts = self.facts
        sizes, others = self._shapes_to_time(fits)
        self.how = "timed in an earlier run"
        if facts.scatter > SCATTERED or facts.seconds.keys().isdisjoint(sizes):
            started = self.clock()
            work = self.request.work
            with work.filled(), rehearsal(work, recompute=self.recompute) as prepare:
                timings = measure(prepare, sizes, others, self.budget_s, self.clock, self.meter)
            facts.add_timings(timings.seconds, timings.scatter)
            if timings.failed is not None:
                facts.failed_bytes = self.peak(timings.failed).peak_bytes
            shapes = plural(len(timings.seconds), "shape")
            self.how = f"timed {shapes} in {self.clock() - started:.1f} s"
        of_sizes = self._known_seconds(sizes)
        # Memory ran out for the smallest.
        if not of_sizes:
            raise does_not_fit(self.request, self.limit_bytes, self.peak)
        self.scatter = facts.scatter
        return fit_speed(of_sizes, self._known_seconds(others))

    def _known_seconds(self, shapes: Sequence[Shape]) -> dict[Shape, float]:
        """Give the seconds of those shapes that were timed: of others there was no time left."""
        found = dict[Shape, float]()
        for shape in shapes:
            if shape in self.facts.seconds:
                found[shape] = self.facts.seconds[shape]
        return found

    def budget_s(self, rate: float) -> float:
        """Give the seconds that timing may take, by those that a position takes."""
        request = self.request
        per_step = fmean(float(lengths.sum()) for lengths in request.batches)
        run_s = rate * (request.num_steps * per_step / request.layout.world_size)
        return min(max(RUN_SHARE * run_s, LEAST_BUDGET_S), MOST_BUDGET_S)

    def _shapes_to_time(self, fits: int) -> tuple[list[Shape], list[Shape]]:
        """Choose shapes: sizes at the typical length, one at others, and a tiny one: fixed cost."""
        request, typical = self.request, self.request.typical
        caps = self.caps_up_to(fits)
        middle = min(caps, key=lambda cap: abs(cap - QUADRATIC_TOKENS))

        def shape(size: int, length: int) -> Shape:
            return Shape(max(1, min(request.most_samples, size // length)), length)

        sizes = list(dict.fromkeys(shape(cap, typical) for cap in caps))
        if request.shortest == request.longest:
            return sizes, []  # attention's share is the same in every sample, and so is the cut
        tiny = request.padded(max(request.shortest, typical // TINY_PARTS))
        quarter = request.padded(max(request.shortest, typical // 4))
        lengths = sorted({quarter, request.padded(request.longest)} - {typical})
        return sizes, [shape(min(fits, 2 * tiny), tiny), *(shape(middle, n) for n in lengths)]


def _described(best: MemoryVariant, row: Candidate, fastest_s: float) -> tuple[str, str]:
    """Say in a few words why it is this cap, and how it is known; `fastest_s` is of all steps."""
    request, slower = best.request, best.times[row.max_tokens] / fastest_s - 1.0
    choice, how = f"as fast as any of {len(best.rows)} that fit", best.how
    if not request.timed:
        choice = "the largest that fits"
    elif len(best.rows) == 1:
        choice = "which fits"
    elif math.isinf(best.scatter):
        choice, how = "the usual size, untimed", f"{how}, too slow to compare sizes"
    elif slower > NEAR_BEST:
        choice = "no size is clearly faster"
        how += f", another size was {slower:.0%} faster, within the noise of {best.scatter:.0%}"
    # Under `deterministic` the cap may not depend on timings.
    if request.fixed_cap is not None:
        choice, how = "the usual size, untimed", "not timed: deterministic"
    method = [best.facts.method, how, request.limit.source]
    sample_cap = request.single_sample_cap
    if row.max_tokens < sample_cap:
        method = [f"longer samples, up to {sample_cap:,}, are each alone in one", *method]
    return choice, "; ".join(method)
