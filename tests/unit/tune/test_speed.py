"""The arithmetic of timing, on a clock that only moves when a shape is run."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.tune_support import Stubborn, assert_same, traces, workload
from trainer.plan.cut import Plan
from trainer.plan.memory import Shape
from trainer.tune.speed import (
    FEWEST,
    MOST,
    NEAR_BEST,
    OVERHEAD_S,
    SpeedModel,
    fit_shapes,
    fit_speed,
    measure,
    positions,
    rehearsal,
    terms,
)

SIZES = [Shape(2**k, 64) for k in range(8)]
OTHERS = [Shape(1, 4), Shape(4, 256), Shape(64, 16)]


class Machine:
    """A device whose seconds are known: three terms, slower beyond a cache, noisy at will."""

    def __init__(self, cache=10**9, noise=None, memory=10**9) -> None:
        self.now = 0.0
        self.ran: list[Shape] = []
        self.cache, self.memory = cache, memory
        self.noise = noise or (lambda _: 1.0)

    def clock(self) -> float:
        return self.now

    def seconds(self, shape: Shape) -> float:
        linear, constant, pairs = terms(shape)
        bend = max(1.0, (positions(shape) / self.cache) ** 0.5)
        return (0.007 * constant + 1e-4 * linear + 1e-7 * pairs) * bend

    def prepare(self, shape: Shape):
        def run() -> None:
            if positions(shape) > self.memory:
                raise torch.OutOfMemoryError("simulated")
            self.ran.append(shape)
            self.now += self.seconds(shape) * self.noise(len(self.ran))

        return run

    def measure(self, budget_s=60.0):
        return measure(self.prepare, SIZES, OTHERS, lambda _: budget_s, self.clock)


@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=3),
    st.sets(st.tuples(st.integers(1, 64), st.integers(1, 512)), min_size=4, max_size=8),
)
def test_a_fit_reproduces_what_such_terms_made(coefficients, shapes):
    shapes = [Shape(*shape) for shape in shapes]
    values = {
        s: float(np.dot([coefficients[0], 1e6 * coefficients[1] + 1, coefficients[2]], terms(s)))
        for s in shapes
    }
    found = fit_shapes(values)
    assert (found >= 0).all()
    for shape, value in values.items():
        assert float(np.dot(found, terms(shape))) == pytest.approx(value, rel=1e-6)


def test_the_time_model_is_found_again_despite_outliers():
    machine = Machine(noise=lambda run: 5.0 if run % 13 == 0 else 1.0)
    seconds = machine.measure().seconds
    model = fit_speed({s: seconds[s] for s in SIZES}, {s: seconds[s] for s in OTHERS})
    assert model.cost.fixed == pytest.approx(70 + OVERHEAD_S / 1e-4, rel=1e-6)
    assert model.cost.quadratic == pytest.approx(1e-3, rel=1e-6)
    assert model.cost.seconds_per_token == pytest.approx(1e-4, rel=1e-6)
    assert model.bends == pytest.approx(np.ones(len(SIZES)))


def test_sizes_that_outgrow_the_cache_bend_away_from_the_line_and_are_soon_no_longer_tried():
    timed = Machine(cache=256).measure().seconds
    assert SIZES[-1] not in timed
    assert set(OTHERS) <= set(timed)
    seconds = Machine(cache=1024).measure().seconds
    sizes = {s: seconds[s] for s in SIZES if s in seconds}
    model = fit_speed(sizes, {s: seconds[s] for s in OTHERS})
    for shape, measured in sizes.items():
        assert model.seconds(shape) == pytest.approx(measured + OVERHEAD_S)
    assert model.bends[-1] > 1.25
    assert model.cost.seconds_per_token == pytest.approx(1e-4, rel=0.1)


def test_sizes_whose_timings_disagree_are_timed_again_and_those_far_behind_are_not():
    draws = np.random.default_rng(0)
    machine = Machine(noise=lambda _: 1.0 + draws.exponential(0.5))
    found = machine.measure(budget_s=600)
    assert FEWEST < max(map(machine.ran.count, SIZES)) <= MOST
    assert found.rates[SIZES[0]] > 1.3 * found.rates[SIZES[5]]
    assert machine.ran.count(SIZES[0]) <= FEWEST + 1, "and once to set up"
    assert found.scatter > NEAR_BEST >= Machine().measure().scatter


@pytest.mark.parametrize("budget_s", [0.0, 0.3])
def test_timing_keeps_to_its_budget_and_compares_nothing_without_two_sizes(budget_s):
    machine = Machine()
    timed = machine.measure(budget_s)
    assert SIZES[0] in timed.seconds
    assert machine.now <= max(budget_s, machine.seconds(SIZES[0]))
    assert math.isinf(timed.scatter) == (budget_s < 0.3)


def test_a_size_that_runs_out_of_memory_ends_the_search_and_is_named():
    found = Machine(memory=1000).measure()
    assert found.failed == Shape(16, 64)
    assert list(found.seconds) == [SIZES[0], OTHERS[0], *SIZES[1:4]]
    assert Machine(memory=1).measure().failed == SIZES[0]


def test_ranks_in_lockstep_wait_for_the_slowest_of_each():
    lengths = np.array([10, 2, 3, 9], dtype=np.int64)
    plan = Plan(
        ranks=((np.array([0]), np.array([1])), (np.array([2]), np.array([3]))),
        lengths=lengths,
        padded_lengths=((10, 2), (3, 9)),
    )
    model = SpeedModel(coefficients=np.array([1.0, 5.0, 0.0]))
    assert model.step_seconds(plan) == pytest.approx(10 + 12)
    assert model.step_seconds(plan, lockstep=True) == pytest.approx(10 + 5 + 9 + 5)


def test_timing_changes_no_bit_of_the_live_model_and_the_random_generator():
    model = Stubborn()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    model.eval()
    model.norm.train()
    before = traces(model, runs=True)
    with rehearsal(workload(model), recompute=True) as prepare:
        prepare(Shape(4, 16))()
        assert model.norm.num_batches_tracked == 1
        assert not torch.equal(torch.get_rng_state(), before["random"])
    assert_same(traces(model, runs=True), before)
    assert not model.training
    assert model.norm.training
