"""Time a few micro-batches and say what any step would take.

A line through two shapes says how time grows while kernels are small. On a CPU it bends: beyond
some thousand tokens activations leave the cache, and the largest micro-batch that fits may run at
half the speed of a small one. So every candidate size is timed, and the line is corrected by
what was seen at that size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median_high
from typing import final

import numpy as np
import torch

from trainer.core import gpu
from trainer.core.out_of_memory import AllocationGuard
from trainer.models.bind import Casts
from trainer.models.compilation import COMPILED_SHAPES, with_compilation
from trainer.plan.cut import Cost, FloatArray, Plan
from trainer.plan.memory import Shape
from trainer.tune.workload import Workload

Clock = Callable[[], float]
PrepareShape = Callable[[Shape], Callable[[], None]]
"""Makes the data of a shape ready, and gives what computes it and nothing else."""

# Timings per shape: the quickest counts, since a disturbance only ever adds time
FEWEST, MOST = 2, 8
NEAR_BEST = 0.03  # times that differ by less count as equal
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


@contextmanager
def rehearsal(work: Workload, *, recompute: bool) -> Iterator[PrepareShape]:
    """Lend the live model to be timed; it is left bit for bit as it was.

    What it yields prepares forward and backward of a shape, which compiles at that; to run it waits
    for the device.
    """
    known, module = set[Shape](), work.model.module
    compilation: AbstractContextManager[object] = nullcontext()
    if work.compiled:
        compilation = with_compilation(module, COMPILED_SHAPES)

    def prepare(shape: Shape) -> Callable[[], None]:
        fields = work.fields(*shape)

        def run() -> None:
            work.backward(fields)
            gpu.wait()

        if work.compiled and shape not in known:
            run()
            known.add(shape)
        return run

    once = Casts(module).once(work.model.device.type)
    with work.live(recompute=recompute), compilation, once:
        yield prepare


@final
@dataclass(kw_only=True)
class Timings:
    """What was timed of forward and backward, shape by shape."""

    prepare: PrepareShape
    sizes: Sequence[Shape]  # of one length, ascending
    clock: Clock  # seconds that the budget counts
    meter: Clock  # seconds that a shape takes
    taken: dict[Shape, list[float]] = field(default_factory=dict)  # seconds of each run
    spent_s: float = 0.0  # by runs, but not by what makes them ready, such as a compiler
    failed: Shape | None = None  # the first for which memory ran out, if any did

    def time(self, shape: Shape) -> None:
        """Run a shape once."""
        run = self.prepare(shape)
        began, started = self.clock(), self.meter()
        run()
        self.taken.setdefault(shape, []).append(self.meter() - started)
        self.spent_s += self.clock() - began

    @property
    def seconds(self) -> dict[Shape, float]:
        """The quickest run of each shape.

        No size takes more than a larger one, which does the same and more: short kernels suffer
        most when another program takes a core.
        """
        quickest, least = {shape: min(runs) for shape, runs in self.taken.items()}, math.inf
        for size in reversed(self.sizes):
            if size in quickest:
                quickest[size] = least = min(least, quickest[size])
        return quickest

    @property
    def rates(self) -> dict[Shape, float]:
        """Seconds per position of the sizes, ascending in size."""
        seconds, rates = self.seconds, dict[Shape, float]()
        for size in self.sizes:
            if size in seconds:
                rates[size] = seconds[size] / positions(size)
        return rates

    @property
    def scatter(self) -> float:
        """How far the second-quickest run lies above the quickest, in the median of all shapes.

        Infinite where no two sizes were run often enough to be compared.
        """
        gaps = dict[Shape, float]()
        for shape, runs in self.taken.items():
            if len(runs) >= FEWEST:
                gaps[shape] = gap(runs)
        compared = gaps.keys() & set(self.sizes)
        if not gaps or len(compared) < min(2, len(self.sizes)):
            return math.inf
        return median_high(gaps.values())

    def is_promising(self, shape: Shape, budget: Callable[[float], float]) -> bool:
        """Leave out what takes more than half of the time left, and sizes once two fell behind."""
        *before, second, last = [math.inf, math.inf, *self.rates.values()]
        # With fewer than three sizes there is none before the last two.
        fell_behind = min(second, last) > CONTENDER * min(before, default=math.inf)
        rate = min(self.rates.values())
        has_time = rate * positions(shape) <= (budget(rate) - self.spent_s) / 2
        return has_time and not (shape in self.sizes and fell_behind)

    def undecided(self) -> list[Shape]:
        """Give the shapes that few runs know, and those whose runs disagree and time matters."""
        rates, shapes = self.rates, list[Shape]()
        enough = CONTENDER * min(rates.values())
        for shape, runs in self.taken.items():
            disagree = len(runs) < MOST and gap(runs) > NEAR_BEST
            if len(runs) < FEWEST or (disagree and rates.get(shape, 0.0) <= enough):
                shapes.append(shape)
        return shapes


def gap(runs: Sequence[float]) -> float:
    """Say how far the second-quickest run lies above the quickest; infinite where few are."""
    if len(runs) < FEWEST:
        return math.inf
    quickest, second, *_ = sorted(runs)
    return second / quickest - 1.0


def measure(
    prepare: PrepareShape,
    sizes: Sequence[Shape],
    others: Sequence[Shape],
    budget: Callable[[float], float],
    clock: Clock = time.perf_counter,
    meter: Clock | None = None,
) -> Timings:
    """Time shapes once each, then the promising ones in turn until they agree or time is up.

    The rounds are interleaved, so that a disturbance slows all shapes. What takes more than half of
    the time left is left out, and so are larger sizes once two in a row fell behind. Where no
    second size can be timed there is nothing to compare, and nothing is timed again. `sizes` are of
    one length, ascending, and the first is always timed; `others` are of other lengths. `budget`
    takes the best seconds per position so far, and gives those to spend in all, by `clock`. `meter`
    times a shape.
    """
    timings = Timings(prepare=prepare, sizes=sizes, clock=clock, meter=meter or clock)
    for shape in (*sizes[:1], *sizes[:1], *others[:1], *sizes[1:], *others[1:]):
        if timings.taken and not timings.is_promising(shape, budget):
            continue
        with AllocationGuard() as guard:
            timings.time(shape)
        if guard.failed:
            timings.failed = shape
            return timings
        # The very first run sets libraries up, and counts only where no second one follows.
        timings.taken[shape] = timings.taken[shape][-1:]
    if len(timings.rates) <= 1:
        return timings
    for _ in range(MOST):
        for shape in timings.undecided():
            budget_s = budget(min(timings.rates.values()))
            if timings.spent_s + timings.seconds[shape] <= budget_s:
                timings.time(shape)
    return timings


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
        if lockstep:
            return float(sum(map(max, zip(*ranks, strict=True))))
        return max(map(sum, ranks))


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
    on_line = dict[Shape, float]()
    for shape, seconds in sizes.items():
        is_larger = positions(shape) > positions(fastest)
        if not is_larger or rates[shape] <= LEFT_LINE * rates[fastest]:
            on_line[shape] = seconds
    coefficients = fit_shapes({**on_line, **others})
    # Where a constant explains everything, a token still takes time: nothing divides by zero.
    coefficients[0] = max(coefficients[0], 0.01 * rates[fastest])
    # And no micro-batch begins for free, whatever chance makes of the constant: a cut at no cost
    # would put every sample alone.
    coefficients[1] = max(coefficients[1] + OVERHEAD_S, LEAST_FIXED * coefficients[0])
    ascending, bends = sorted(sizes, key=positions), list[float]()
    for shape in ascending:
        fitted = float(np.dot(coefficients, terms(shape)))
        bends.append((sizes[shape] + OVERHEAD_S) / fitted)
    return SpeedModel(coefficients=coefficients, sizes=[*map(positions, ascending)], bends=bends)


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
    relative = np.array([*map(terms, measured)]) / values[:, None]
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
