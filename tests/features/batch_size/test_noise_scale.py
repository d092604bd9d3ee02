"""The noise scale is what it is known to be, for ragged sizes; sorted micro-batches mislead it."""

import math

import pytest
import torch

from tests.lib.noise_toys import NOISE, SIGNAL, Gaussian, bench_of, measured
from trainer.core.stateful import StepGradient
from trainer.features.batch_size.noise_scale import MEASURED, NoiseScale, _interval
from trainer.plan.cuts import Budget, Fixed

SORTED = Budget(max_tokens=400)


def test_known_noise_is_found_within_5_percent_in_ragged_micro_batches():
    found = measured(bench_of(SORTED), 60)
    assert found == pytest.approx(NOISE / SIGNAL, rel=0.05)


@pytest.mark.slow
def test_compiled_blocks_measure_what_others_do(no_graphs):
    """By the graphs of autograd, without code for them, which takes half a minute."""
    bench = bench_of(Fixed(micro=5))
    for block in bench.module.blocks:
        block.compile(backend="aot_eager")
    expected = measured(bench_of(Fixed(micro=5)), 3)
    assert measured(bench, 3) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_random_micro_batches_see_what_micro_batches_sorted_by_length_take_for_noise():
    data = Gaussian(by_length=1.0)
    found = measured(bench_of(SORTED, data), 60)
    assert found == pytest.approx(data.noise_scale, rel=0.1)
    assert measured(bench_of(SORTED, data), 60, random_slots=64) > 2 * data.noise_scale


def test_the_estimate_is_unbiased_where_it_covers_a_part_of_the_batch_and_sizes_differ():
    torch.manual_seed(0)
    shares = torch.tensor([0.02, 0.05, 0.1, 0.01, 0.82], dtype=torch.float64)
    size, part = 100, NoiseScale("samples")
    true = torch.zeros(32, dtype=torch.float64)
    true[0] = 1.0
    for _ in range(4000):
        noise = torch.randn(5, 32, dtype=torch.float64) * (0.5 / size * shares[:, None]).sqrt()
        added = shares[:, None] * true + noise
        own = added[:4].square().sum(1) / shares[:4]
        sums = dict(zip(MEASURED, (4, float(shares[:4].sum()), own.sum()), strict=True))
        norm = added.sum(0).norm()
        step = {"step": 1, "num_samples": size, "num_tokens": 1}
        part.see_gradient(StepGradient(norm=norm, measured=sums, **step))
    assert float(part.metrics()["noise_scale"]) == pytest.approx(16.0, rel=0.05)


def test_the_true_noise_scale_lies_within_the_interval_that_shrinks_as_a_run_goes_on():
    torch.manual_seed(0)
    known, widths = [], []
    for num_steps in (30, 300):
        part = NoiseScale("samples")
        assert part.estimate().low == 0.0
        assert not part.estimate().is_precise
        for _ in range(num_steps):
            added = torch.full((8, 64), 1 / 64, dtype=torch.float64)
            added += torch.randn_like(added) / 16  # S / B = 8 x 64 / 256 = 2, and |G|^2 = 1
            sums = dict(zip(MEASURED, (8, 1.0, 8 * added.square().sum()), strict=True))
            step = {"step": 1, "norm": added.sum(0).norm(), "num_samples": 64, "num_tokens": 1}
            part.see_gradient(StepGradient(**step, measured=sums))
        found = part.estimate()
        assert found.scale == pytest.approx(float(part.metrics()["noise_scale"]))
        known.append(found.low < 128.0 < found.high)
        widths.append(found.high / found.low)
    assert known == [True, True]
    assert widths[1] - 1 < (widths[0] - 1) / 2
    assert found.is_precise


@pytest.mark.parametrize(
    ("noise", "signal", "low", "high"),
    [
        ((100.0, 100.0), (1.0, 0.0), 0.0, 300.0),  # S may be zero
        ((100.0, 0.0), (1.0, 0.25), 100 / 1.5, 200.0),
        ((100.0, 10.0), (1.0, 0.6), 80 / 2.2, math.inf),
        ((0.0, 0.0), (0.0, 0.0), 0.0, math.inf),  # of a gradient that is always zero
    ],
)
def test_two_standard_errors_are_on_either_side(noise, signal, low, high):
    found = _interval(*noise, *signal)
    assert (found["low"], found["high"]) == (pytest.approx(low), pytest.approx(high, rel=1e-2))


def test_what_is_not_measured_is_not_shown_and_a_signal_below_the_noise_is_infinite():
    part = NoiseScale("samples")
    step = {"step": 1, "norm": torch.tensor(1.0), "num_samples": 4, "num_tokens": 40}
    part.see_gradient(StepGradient(**step))
    assert part.metrics() == {}
    sums = dict(zip(MEASURED, (2, 1.0, torch.tensor(9.0).double()), strict=True))
    part.see_gradient(StepGradient(**step, measured=sums))
    assert math.isinf(part.metrics()["noise_scale"])
    assert part.metrics() == {}
