"""Time a few micro-batches and say what any step would take.

A line through two shapes says how time grows while kernels are small. On a CPU it bends: beyond
some thousand tokens activations leave the cache, and the largest micro-batch that fits may run at
half the speed of a small one. So every candidate size is timed, and the line is corrected by
what was seen at that size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Self, final

import numpy as np
import torch

from trainer.core.out_of_memory import AllocationGuard
from trainer.plan.cut import Cost, FloatArray, Plan
from trainer.plan.memory import Shape
from trainer.tune.fit import fit_shapes, terms
from trainer.tune.restored import restoring
from trainer.tune.workload import Workload

Clock = Callable[[], float]
Prepare = Callable[[Shape], Callable[[], None]]
"""Makes the data of a shape ready, and gives what computes it and nothing else."""

ROUNDS = 12
"""Timings per shape, at most; the quickest counts, since a disturbance only ever adds time."""

FEWEST = 3
"""Timings of a shape that must agree: that many seldom suffer the same disturbance by chance."""

AGREED = 0.03
"""How far the quickest timings of a shape may differ for it not to be timed again."""

TELLING_SHAPES = 3
"""Shapes that must have been repeated for a machine to count as quiet."""

TELLING_SIZES = 2
"""Numbers of positions that must have been timed for sizes to be compared by time."""

QUIET = 0.05
"""Noise above which other programs were in the way."""

CONTENDER = 1.25
"""A size whose time per token is this much above the best is not timed again."""

LEFT_LINE = 1.1
"""Time per token over the best, beyond which a larger size no longer lies on the fitted line."""

OVERHEAD_S = 2e-4
"""What a micro-batch takes outside of forward and backward: to collate, seed, divide and count."""

LEAST_FIXED = 8.0
"""Least fixed cost of a micro-batch, in tokens; on two CPU cores 33 to 150 were measured."""

RUN_SHARE = 0.02
"""Of a run, that tuning may take."""

MOST_BUDGET_S = 10.0
"""What tuning may take in a run of any length, and timing at most."""

LEAST_BUDGET_S = 1.5
"""What timing may take in the shortest run."""


def meter_for(device: torch.device) -> Clock:
    """Choose a clock for forward and backward.

    On a CPU it is the time that the calling thread computes: it runs everything that is serial and
    its share of the rest, autograd's included, and does not move while another program has the
    core.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


def time_budget(run_s: float, budget_s: float = MOST_BUDGET_S) -> float:
    """Give the seconds that timing may take: 2 % of the run, within [1.5 s, `budget_s`].

    Args:
        run_s: estimate for the whole run.
        budget_s: never more than this.
    """
    return min(max(RUN_SHARE * run_s, LEAST_BUDGET_S), budget_s)


@final
class Stopwatch:
    """Tells how long tuning has taken, and whether it may go on.

    Attributes:
        clock: seconds that tuning takes.
        meter: seconds that a shape takes.
        budget_s: what tuning may take so far; the time to measure is kept back at first.
        was_short: whether it had to stop for that.
    """

    def __init__(self, clock: Clock, meter: Clock) -> None:
        self.clock = clock
        self.meter = meter
        self.budget_s = MOST_BUDGET_S - LEAST_BUDGET_S
        self.was_short = False
        self._started = clock()

    def elapsed(self) -> float:
        """Give seconds since the start."""
        return self.clock() - self._started

    def has_room_for(self, seconds: float) -> bool:
        """Tell whether something that takes so long may begin; remembers a refusal."""
        has_room = self.elapsed() + seconds <= self.budget_s
        self.was_short = self.was_short or not has_room
        return has_room

    def allow(self, run_s: float) -> None:
        """Allow what all of tuning may take: 10 s or 2 % of the run, whichever is more."""
        self.budget_s = max(MOST_BUDGET_S, RUN_SHARE * run_s)


@final
@dataclass(frozen=True, kw_only=True)
class Timings:
    """What was timed.

    Attributes:
        seconds: of one forward and backward, by shape.
        noise: how far the third-quickest timing of a shape typically lies above the quickest;
            infinite where too little was repeated.
        failed: the smallest shape for which memory ran out, if any did.
    """

    seconds: Mapping[Shape, float]
    noise: float = math.inf
    failed: Shape | None = None


@contextmanager
def rehearsal(work: Workload, *, recompute: bool) -> Iterator[Prepare]:
    """Lend out the live model, which is left bit for bit as it was when the block ends.

    Yields:
        Prepares forward and backward of a shape; to run it waits for the device.
    """
    device = work.device

    def prepare(shape: Shape) -> Callable[[], None]:
        fields = work.fields(*shape)

        def run() -> None:
            work.backward(fields)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    with work.filled(), restoring(work.model, work.objective), work.variant(recompute=recompute):
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
    a second. The rounds are interleaved, so that a disturbance meets all shapes alike. A shape
    agrees when its three quickest timings do: a disturbance only ever adds time, and seldom the
    same. A shape is left out when it would take more than half of what is left (all of it, as
    long as there is nothing to compare it with), and a size when two in a row fell behind.

    Args:
        prepare: gives a function that computes one shape.
        sizes: of one length, ascending; the first is always timed.
        others: of other lengths.
        budget: seconds per position, the best so far -> seconds to spend in all.
        clock: seconds that the budget counts.
        meter: seconds that a shape takes; the clock's unless given.
        patience_s: what may be spent, where it is more, until two sizes can be compared.
    """
    timed = partial(_timed, prepare, clocks=(meter or clock, clock))
    started, deadline = clock(), 0.0
    once: dict[Shape, float] = {}
    took: dict[Shape, float] = {}
    with AllocationGuard() as guard:
        prepare(sizes[0])()  # libraries set themselves up in the very first run
    if guard.failed:
        return Timings(seconds={}, failed=sizes[0])
    for shape in (*sizes, *others):
        if once:
            rates = _rates(once, sizes)
            deadline = started + budget(min(rates))
            patient = max(deadline, started + patience_s)
            # The rounds that follow take the other half, once there is something to compare.
            until = deadline if len(once) >= TELLING_SIZES else patient
            left = (until - clock()) / min(TELLING_SIZES, len(once))
            last = max(took, key=positions)
            needed = took[last] / positions(last) * positions(shape)
            if needed > left or (shape in sizes and _fell_behind(rates)):
                continue
        with AllocationGuard() as guard:
            once[shape], took[shape] = timed(shape)
            # One that seems to fall behind may only have been disturbed.
            again = shape in sizes and _fell_behind(_rates(once, sizes))
            once[shape] = min(once[shape], timed(shape)[0]) if again else once[shape]
        if guard.failed:
            return Timings(seconds=once, failed=shape)
    samples: dict[Shape, list[float]] = {shape: [] for shape in once}
    repeats = (shape for round_ in range(ROUNDS) for shape in _to_repeat(samples, round_, others))
    for shape in repeats:
        if clock() + took[shape] <= deadline:
            samples[shape].append(timed(shape)[0])
    return _judged(once, samples, sizes, len(sizes) + len(others))


def _to_repeat(
    samples: Mapping[Shape, Sequence[float]], round_: int, others: Sequence[Shape]
) -> list[Shape]:
    """Give the shapes whose timings do not agree yet and whose time matters to the choice."""
    if round_ < FEWEST:
        return [*samples]
    quickest = {shape: min(seconds) for shape, seconds in samples.items() if seconds}
    rates = {shape: s / positions(shape) for shape, s in quickest.items() if shape not in others}
    slowest = CONTENDER * min(rates.values(), default=math.inf)
    return [
        shape
        for shape in quickest
        if _gap(samples[shape]) > AGREED and rates.get(shape, 0.0) <= slowest
    ]


def _gap(seconds: Sequence[float]) -> float:
    """Say how far the third-quickest timing lies above the quickest; infinite where few are."""
    if len(seconds) < FEWEST:
        return math.inf
    ascending = sorted(seconds)
    return ascending[FEWEST - 1] / ascending[0] - 1.0


def _judged(
    once: Mapping[Shape, float],
    samples: Mapping[Shape, Sequence[float]],
    sizes: Sequence[Shape],
    num_asked: int,
) -> Timings:
    """Take the quickest of every shape, and tell how noisy they were."""
    quickest = {**once, **{shape: min(seconds) for shape, seconds in samples.items() if seconds}}
    ordered = _never_slower_than_larger({s: quickest[s] for s in sizes if s in once})
    seconds = quickest | ordered
    gaps = [gap for each in samples.values() if math.isfinite(gap := _gap(each))]
    corrected = max(quickest[shape] / seconds[shape] - 1.0 for shape in quickest)
    is_known = len(gaps) >= min(TELLING_SHAPES, num_asked)
    noise = max(median_high(gaps), corrected) if is_known else math.inf
    return Timings(seconds=seconds, noise=noise)


def _never_slower_than_larger(seconds: Mapping[Shape, float]) -> dict[Shape, float]:
    """Give every size at most the time of a larger one, which does the same and more.

    Short kernels suffer most when another program takes a core, so that a small micro-batch can
    look slower than one ten times its size.
    """
    ascending = sorted(seconds, key=positions)
    times = np.minimum.accumulate([seconds[shape] for shape in reversed(ascending)])
    return dict(zip(reversed(ascending), map(float, times), strict=True))


def _timed(prepare: Prepare, shape: Shape, clocks: tuple[Clock, Clock]) -> tuple[float, float]:
    """Run a shape; gives what each clock says it took."""
    run = prepare(shape)
    started = [clock() for clock in clocks]
    run()
    first, second = (clock() - start for clock, start in zip(clocks, started, strict=True))
    return first, second


def _rates(seconds: Mapping[Shape, float], sizes: Sequence[Shape]) -> list[float]:
    """Give the time per position of the sizes that were timed, ascending in size."""
    return [seconds[size] / positions(size) for size in sizes if size in seconds]


def _fell_behind(rates: Sequence[float]) -> bool:
    """Tell whether the last two rates are both clearly slower than the best before them."""
    *before, second, last = [0.0, 0.0, *rates]
    best = min((rate for rate in before if rate), default=math.inf)
    return min(second, last) > CONTENDER * best


def positions(shape: Shape) -> int:
    """Computed positions of a micro-batch of this shape."""
    return shape.num_samples * shape.length


@final
@dataclass(frozen=True, kw_only=True)
class SpeedModel:
    """Time of any micro-batch: three fitted terms times what was seen at its size.

    Attributes:
        coefficients: time per term of `fit.terms`.
        sizes: `(timed,)`, positions of the timed shapes, ascending.
        bends: `(timed,)`, measured over fitted time.
    """

    coefficients: FloatArray
    sizes: FloatArray
    bends: FloatArray

    @classmethod
    def of(cls, cost: Cost) -> Self:
        """Take a time model that was not timed here; its unit is the time of one token."""
        one = np.ones(1)
        return cls(coefficients=np.array([cost.fixed, 1.0, cost.quadratic]), sizes=one, bends=one)

    @property
    def cost(self) -> Cost:
        """The fitted terms in the unit of a plan: the time of one token."""
        constant, linear, pairs = map(float, self.coefficients)
        return Cost(fixed=constant / linear, quadratic=pairs / linear, seconds_per_token=linear)

    def seconds(self, shape: Shape) -> float:
        """Estimate forward and backward of one micro-batch."""
        fitted = float(np.dot(self.coefficients, terms(shape)))
        return fitted * float(np.interp(positions(shape), self.sizes, self.bends))

    def step_seconds(self, plan: Plan, *, lockstep: bool = False) -> float:
        """Estimate the time of one step.

        Args:
            plan: its micro-batches.
            lockstep: ranks meet in every micro-batch and wait there for the slowest; otherwise
                only at the end of the step.
        """
        ranks = [
            [self.seconds(_shape(plan, rank, slot)) for slot in range(len(slots))]
            for rank, slots in enumerate(plan.ranks)
        ]
        if lockstep:
            meetings: Iterable[tuple[float, ...]] = zip(*ranks, strict=True)
            return sum(max(slot) for slot in meetings)
        return max(sum(slots) for slots in ranks)


def _shape(plan: Plan, rank: int, slot: int) -> Shape:
    """Give a micro-batch's shape; a packed row counts as samples of their mean length."""
    num_samples = max(1, len(plan.ranks[rank][slot]))
    return Shape(num_samples, plan.positions(rank, slot) // num_samples)


def fit_speed(sizes: Mapping[Shape, float], others: Mapping[Shape, float]) -> SpeedModel:
    """Fit the line where it holds, and note how far the larger sizes lie above it.

    Sizes beyond the fastest that lose more than 10 % against it have left the line and do not
    take part in the fit.

    Args:
        sizes: seconds of shapes of one length, at least one.
        others: of shapes of other lengths, which tell attention's share.
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
    coefficients[1] = max(coefficients[1], 0.01 * rates[fastest])
    # And no micro-batch begins for free, whatever noise makes of the constant: a cut at no cost
    # would put every sample alone.
    coefficients[0] = max(coefficients[0] + OVERHEAD_S, LEAST_FIXED * coefficients[1])
    ascending = sorted(sizes, key=positions)
    fitted = np.array([np.dot(coefficients, terms(shape)) for shape in ascending])
    return SpeedModel(
        coefficients=coefficients,
        sizes=np.array([positions(shape) for shape in ascending], dtype=np.float64),
        bends=(np.array([sizes[shape] for shape in ascending]) + OVERHEAD_S) / fitted,
    )
