"""Time a few micro-batches and say what any step would take.

A line through two shapes says how time grows while kernels are small. On a CPU it bends: beyond
some thousand tokens activations leave the cache, and the largest micro-batch that fits may run at
half the speed of a small one. So every candidate size is timed, and the line is corrected by
what was seen at that size.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median_high
from typing import final

import numpy as np
import torch

from trainer.core.out_of_memory import AllocationGuard
from trainer.models.bind import Casts
from trainer.models.compilation import with_compilation
from trainer.plan.cut import Cost, FloatArray, Plan
from trainer.plan.memory import Shape
from trainer.tune.layout import COMPILED_SHAPES
from trainer.tune.workload import Workload

Clock = Callable[[], float]
Prepare = Callable[[Shape], Callable[[], None]]
"""Makes the data of a shape ready, and gives what computes it and nothing else."""

# Timings per shape, at most; the quickest counts, since a disturbance only ever adds time
ROUNDS = 12
# Timings of a shape that must agree: that many seldom suffer the same disturbance by chance
FEWEST = 3
AGREED = 0.03  # how far the quickest timings of a shape may differ for it not to be timed again
REPEATED_SHAPES = 3  # shapes that must have been repeated for a machine to count as quiet
COMPARED_SIZES = 2  # numbers of positions that must have been timed for sizes to be compared
QUIET = 0.05  # noise above which other programs were in the way
CONTENDER = 1.25  # a size whose time per token is this much above the best is not timed again
# Time per token over the best, beyond which a larger size no longer lies on the fitted line
LEFT_LINE = 1.1
# What a micro-batch takes outside of forward and backward: to collate, seed, divide and count
OVERHEAD_S = 2e-4
# Least fixed cost of a micro-batch, in tokens: a step cut for 33 was 2 % slower than for 66 to 264
LEAST_FIXED = 64.0


def meter_for(device: torch.device) -> Clock:
    """Choose a clock for forward and backward.

    On a CPU it is the time that the calling thread computes: that does not move while another
    program has the core.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


def positions(shape: Shape) -> int:
    """Computed positions of a micro-batch of this shape."""
    return shape.num_samples * shape.length


@final
@dataclass(frozen=True, kw_only=True)
class Timings:
    """What was timed."""

    seconds: Mapping[Shape, float]  # of one forward and backward
    # How far the third-quickest timing of a shape typically lies above the quickest
    noise: float = math.inf  # where too little was repeated
    failed: Shape | None = None  # the smallest for which memory ran out, if any did


@final
class Stopwatch:
    """A clock that stands still while something compiles, which no step does."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.stopped_s = clock, 0.0

    def __call__(self) -> float:
        """Read it."""
        return self._clock() - self.stopped_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Take no notice of what the block takes."""
        before = self()
        yield
        self.stopped_s += self() - before


@contextmanager
def rehearsal(
    work: Workload, *, recompute: bool, stopwatch: Stopwatch | None = None
) -> Iterator[Prepare]:
    """Lend the live model to be timed; it is left bit for bit as it was.

    Yields:
        Prepares forward and backward of a shape; to run it waits for the device. A compiled model
        compiles as a shape is first prepared, while the stopwatch is stopped.
    """
    known = set[Shape]()
    stopwatch = stopwatch or Stopwatch(time.perf_counter)
    compilation = with_compilation(work.model, COMPILED_SHAPES) if work.compiled else nullcontext()

    def prepare(shape: Shape) -> Callable[[], None]:
        fields = work.fields(*shape)

        def run() -> None:
            work.backward(fields)
            if work.device.type == "cuda":
                torch.cuda.synchronize(work.device)

        if work.compiled and shape not in known:
            with stopwatch.stopped():
                run()
            known.add(shape)
        return run

    once = Casts(work.model).once(work.device.type)
    with work.live(recompute=recompute), compilation, once:
        yield prepare


def measure(
    prepare: Prepare,
    sizes: Sequence[Shape],
    others: Sequence[Shape],
    budget: Callable[[float], float],
    clock: Clock = time.perf_counter,
    meter: Clock | None = None,
    *,
    patience_s: float = 0.0,
) -> Timings:
    """Time shapes once each, then the promising ones in turn until they agree or time is up.

    The first run of a shape warms caches and allocators, and counts only if there is no time for
    a second. The rounds are interleaved, so that a disturbance slows all shapes. A shape agrees
    when its three quickest timings do: a disturbance only ever adds time, and seldom the same.

    Args:
        prepare: gives a function that computes one shape.
        sizes: of one length, ascending; the first is always timed.
        others: of other lengths; the first, the least of all, is timed after the first size.
        budget: seconds per position, the best so far -> seconds to spend in all; twice as much
            where other programs disturb.
        clock: seconds that the budget counts.
        meter: seconds that a shape takes; the clock's unless given.
        patience_s: what may be spent, where it is more, until two sizes can be compared.
    """
    series = _Series(prepare, sizes, clock, meter or clock)
    started, deadline = clock(), 0.0
    for shape in (*sizes[:1], *others[:1], *sizes[1:], *others[1:]):
        if series.once:
            rates = series.rates(series.once)
            deadline = started + budget(min(rates))
            is_alone = len(rates) < COMPARED_SIZES
            until = max(deadline, started + patience_s) if is_alone else deadline
            if not series.is_promising(shape, until - clock()):
                continue
        with AllocationGuard() as guard:
            if not series.once:
                prepare(shape)()  # libraries set themselves up in the very first run
            series.time_once(shape)
        if guard.failed:
            return Timings(seconds=series.once, failed=shape)
    series.repeat(deadline)
    timings = series.judged(len(sizes) + len(others))
    if QUIET < timings.noise < math.inf:  # as much time again, for what other programs blurred
        series.repeat(deadline + deadline - started, range(FEWEST, ROUNDS))
        timings = series.judged(len(sizes) + len(others))
    return timings


@final
@dataclass(frozen=True)
class _Series:
    """Timings of some shapes: the first, and later ones."""

    prepare: Prepare
    sizes: Sequence[Shape]  # of one length, ascending
    clock: Clock
    meter: Clock
    once: dict[Shape, float] = field(default_factory=dict)
    repeated: dict[Shape, list[float]] = field(default_factory=lambda: defaultdict(list))

    def time(self, shape: Shape) -> float:
        """Run a shape once."""
        run, started = self.prepare(shape), self.meter()
        run()
        return self.meter() - started

    def time_once(self, shape: Shape) -> None:
        """Time a shape; again if it seems to fall behind, since it may only have been disturbed."""
        self.once[shape] = self.time(shape)
        if shape in self.sizes and self.fell_behind():
            self.once[shape] = min(self.once[shape], self.time(shape))

    def rates(self, seconds: Mapping[Shape, float]) -> list[float]:
        """Give the time per position of the sizes that were timed, ascending in size."""
        return [seconds[size] / positions(size) for size in self.sizes if size in seconds]

    def fell_behind(self) -> bool:
        """Tell whether the last two sizes are both clearly slower than the best before them."""
        # Two stand for none, so that three sizes are needed.
        *before, second, last = [math.inf, math.inf, *self.rates(self.once)]
        return min(second, last) > CONTENDER * min(before, default=math.inf)

    def is_promising(self, shape: Shape, left_s: float) -> bool:
        """Leave out what takes more than half of what is left, and sizes once two fell behind."""
        last = max(self.once, key=positions)
        needed = self.once[last] / positions(last) * positions(shape)
        # All of it while there is nothing to compare with; the rounds take the other half.
        has_time = needed <= left_s / min(COMPARED_SIZES, len(self.rates(self.once)))
        return has_time and not (shape in self.sizes and self.fell_behind())

    def repeat(self, deadline: float, rounds: range = range(ROUNDS)) -> None:
        """Time shapes in turn until they agree or time is up."""
        for round_ in rounds:
            for shape in [*self.once] if round_ < FEWEST else self.undecided():
                has_time = self.clock() + self.once[shape] <= deadline
                if has_time and len(self.repeated[shape]) < ROUNDS:
                    self.repeated[shape].append(self.time(shape))

    def undecided(self) -> list[Shape]:
        """Give the shapes whose timings do not agree yet and whose time matters to the choice."""
        quickest = {shape: min(seconds) for shape, seconds in self.repeated.items() if seconds}
        slowest = CONTENDER * min(self.rates(quickest), default=math.inf)
        return [
            shape
            for shape, seconds in quickest.items()
            if _gap(self.repeated[shape]) > AGREED
            and (shape not in self.sizes or seconds / positions(shape) <= slowest)
        ]

    def judged(self, num_asked: int) -> Timings:
        """Take the quickest of every shape, and tell how noisy they were."""
        quickest = {shape: min(self.repeated[shape] or [self.once[shape]]) for shape in self.once}
        seconds, least = {**quickest}, math.inf
        # No size takes more time than a larger one, which does the same and more: short kernels
        # suffer most when another program takes a core.
        for shape in reversed([size for size in self.sizes if size in quickest]):
            seconds[shape] = least = min(least, quickest[shape])
        gaps = [gap for each in self.repeated.values() if math.isfinite(gap := _gap(each))]
        corrected = max(quickest[shape] / seconds[shape] - 1.0 for shape in quickest)
        is_known = len(gaps) >= min(REPEATED_SHAPES, num_asked)
        noise = max(median_high(gaps), corrected) if is_known else math.inf
        return Timings(seconds=seconds, noise=noise)


def _gap(seconds: Sequence[float]) -> float:
    """Say how far the third-quickest timing lies above the quickest; infinite where few are."""
    ascending = sorted(seconds)
    return math.inf if len(seconds) < FEWEST else ascending[FEWEST - 1] / ascending[0] - 1.0


@final
@dataclass(frozen=True, kw_only=True)
class SpeedModel:
    """Time of any micro-batch: three fitted terms times what was seen at its size."""

    coefficients: FloatArray  # time per term of `terms`
    sizes: Sequence[float] = (1.0,)  # positions of the timed shapes, ascending
    bends: Sequence[float] = (1.0,)  # measured over fitted time, of each of them

    @property
    def cost(self) -> Cost:
        """The fitted terms in the unit of a plan: the time of one token."""
        linear, constant, pairs = map(float, self.coefficients)
        return Cost(fixed=constant / linear, quadratic=pairs / linear, seconds_per_token=linear)

    def seconds(self, shape: Shape) -> float:
        """Estimate forward and backward of one micro-batch."""
        fitted = float(np.dot(self.coefficients, terms(shape)))
        return fitted * float(np.interp(positions(shape), self.sizes, self.bends))

    def step_seconds(self, plan: Plan, *, lockstep: bool = False) -> float:
        """Estimate the time of one step; in lockstep ranks wait in every micro-batch."""
        ranks: list[list[float]] = [[] for _ in plan.ranks]
        for rank, slot in plan.slots():
            count = max(1, len(plan.ranks[rank][slot]))  # a packed row: of their mean length
            ranks[rank].append(self.seconds(Shape(count, plan.positions(rank, slot) // count)))
        return float(sum(map(max, zip(*ranks, strict=True)))) if lockstep else max(map(sum, ranks))


def speed_of(cost: Cost) -> SpeedModel:
    """Give the times of a plan's time model; in tokens where it knows no seconds."""
    terms = np.array([1.0, cost.fixed, cost.quadratic])
    return SpeedModel(coefficients=terms * (cost.seconds_per_token or 1.0))


def fit_speed(sizes: Mapping[Shape, float], others: Mapping[Shape, float]) -> SpeedModel:
    """Fit the line where it holds, and note how far the larger sizes lie above it.

    Sizes beyond the fastest that lose more than 10 % against it have left the line and do not
    take part in the fit; shapes of other lengths show attention's share.
    """
    rates = {shape: seconds / positions(shape) for shape, seconds in sizes.items()}
    fastest = min(rates, key=lambda shape: rates[shape])
    on_line = {
        shape: seconds
        for shape, seconds in sizes.items()
        if positions(shape) <= positions(fastest) or rates[shape] <= LEFT_LINE * rates[fastest]
    }
    coefficients = fit_shapes({**on_line, **others})
    # Where a constant explains everything, a token still takes time: nothing divides by zero.
    coefficients[0] = max(coefficients[0], 0.01 * rates[fastest])
    # And no micro-batch begins for free, whatever noise makes of the constant: a cut at no cost
    # would put every sample alone.
    coefficients[1] = max(coefficients[1] + OVERHEAD_S, LEAST_FIXED * coefficients[0])
    ascending = sorted(sizes, key=positions)
    fitted = [float(np.dot(coefficients, terms(shape))) for shape in ascending]
    return SpeedModel(
        coefficients=coefficients,
        sizes=[*map(positions, ascending)],
        bends=[(sizes[s] + OVERHEAD_S) / line for s, line in zip(ascending, fitted, strict=True)],
    )


def terms(shape: Shape) -> tuple[float, float, float]:
    """Give what time and memory of a micro-batch grow with: its positions, 1, attention's pairs.

    Positions come first: one shape alone cannot tell terms apart, and no position comes for free.
    """
    return float(positions(shape)), 1.0, float(positions(shape)) * shape.length


def fit_shapes(measured: Mapping[Shape, float]) -> FloatArray:
    """Find a coefficient of each term, none negative, with the least squared relative error.

    Solved exactly: the best of the least-squares solutions over every subset of the terms whose
    coefficients come out non-negative (Lawson and Hanson 1974, ch. 23, has the condition). Of
    equally good ones that with fewer terms counts, then that with earlier ones. What was measured
    is positive.
    """
    values = np.array([*measured.values()], dtype=np.float64)
    relative = np.array([terms(shape) for shape in measured]) / values[:, None]
    # Terms differ by many orders of magnitude; at scale one no small one drowns.
    scale = np.maximum(relative.max(axis=0), np.finfo(np.float64).tiny)
    columns, best, least = relative / scale, np.zeros(3), float(len(values))
    for subset in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        found = np.linalg.lstsq(columns[:, subset], np.ones(len(values)), rcond=None)[0]
        error = float(np.square(columns[:, subset] @ found - 1.0).sum())
        # An equally good fit with fewer terms stays: two lengths cannot tell three apart.
        if (found >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[subset] = found
    coefficients: FloatArray = best / scale
    return coefficients
