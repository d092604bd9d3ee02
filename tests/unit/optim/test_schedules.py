"""Schedules are pure, bounded, and end where they say."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, PolynomialLR

from trainer.core.errors import ConfigError
from trainer.optim.schedules import (
    WSD,
    Constant,
    Cosine,
    InverseSqrt,
    LinearDecay,
    OwnScheduler,
    PolynomialDecay,
    Schedule,
    apply_factor,
)

KINDS = (Constant, Cosine, InverseSqrt, LinearDecay, PolynomialDecay, WSD)


def curve(schedule: Schedule, total: int) -> list[float]:
    return [schedule.factor(step, total) for step in range(total)]


@given(kind=st.sampled_from(KINDS), total=st.integers(1, 500), data=st.data())
def test_a_factor_rises_linearly_to_one_and_falls_from_there_above_zero(kind, total, data):
    warmup = data.draw(st.integers(0, total * 4 // 5 if kind is WSD else total))
    factors = curve(kind(warmup=warmup), total)
    assert factors[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(0.0 < factor <= 1.0 for factor in factors)


def test_a_wsd_schedule_is_flat_until_its_last_share_decays_linearly():
    assert curve(WSD(warmup=2, decay=0.4, floor=0.2), 10) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36], abs=1e-12
    )
    assert curve(WSD(decay=0.2), 10)[7:] == pytest.approx([1, 2 / 3, 1 / 3], abs=1e-12)
    assert curve(WSD(decay=0.0), 10) == [1.0] * 10


@pytest.mark.parametrize(("share", "steps"), [(0.25, 10), (0.03, 1), (0.01, 0)])
def test_a_warmup_below_one_is_a_share_of_the_run(share, steps):
    for kind in KINDS:
        assert curve(kind(warmup=share), 40) == curve(kind(warmup=steps), 40)


def library_curve(build: Callable[[Optimizer], LRScheduler], total: int) -> list[float]:
    """The factors of every step that a scheduler of a library gives."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = build(optimizer), []
    for _ in range(total):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("warmup", "total"), [(7, 60), (0, 8)])
def test_decays_are_those_of_transformers_and_of_pytorch_from_the_end_of_the_warmup_on(
    warmup, total
):
    optimization = pytest.importorskip("transformers.optimization")
    linear = optimization.get_linear_schedule_with_warmup
    polynomial = optimization.get_polynomial_decay_schedule_with_warmup
    root = optimization.get_inverse_sqrt_schedule
    power, half = {"lr_end": 0.125, "power": 2.5}, math.ceil(total / 2)
    pairs = [
        (LinearDecay(warmup=warmup), lambda o: linear(o, warmup, total)),
        (
            PolynomialDecay(warmup=warmup, floor=0.125, power=2.5),
            lambda o: polynomial(o, warmup, total, **power),
        ),
        (InverseSqrt(warmup=warmup), lambda o: root(o, warmup)),
        (InverseSqrt(warmup=warmup, timescale=0.5), lambda o: root(o, warmup, timescale=half)),
    ]
    for schedule, build in pairs:
        ours, theirs = curve(schedule, total), library_curve(build, total)
        assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-12)
        # Theirs begin with a rate of 0, ours with the second step of theirs.
        assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], abs=1e-12)
    cosine = library_curve(lambda o: CosineAnnealingLR(o, total, eta_min=0.25), total)
    assert curve(Cosine(floor=0.25), total) == pytest.approx(cosine, abs=1e-12)
    own = library_curve(lambda o: PolynomialLR(o, total_iters=total, power=2.5), total)
    assert curve(PolynomialDecay(power=2.5), total) == pytest.approx(own, abs=1e-12)
    assert curve(PolynomialDecay(power=2.0), total) != pytest.approx(own, abs=1e-3), "a control"


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MultiStepLR, {"milestones": [5, 20]}), (CosineAnnealingLR, {"T_max": 40})],
)
def test_a_scheduler_of_pytorch_is_its_own_curve_whatever_step_is_asked_first(kind, options):
    expected = library_curve(lambda o: kind(o, **options), 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    schedule = OwnScheduler(kind=kind, options=options)
    found = {step: schedule.factor(step, 40) for step in order}
    assert [found[step] for step in range(40)] == pytest.approx(expected, abs=1e-12)
    warm = curve(OwnScheduler(kind=kind, options=options, warmup=4), 40)
    assert warm == [0.25, 0.5, 0.75, 1.0, *(found[step] for step in range(36))]


@dataclass(frozen=True, kw_only=True)
class Halves(Schedule):
    """Half the rate from the first step after the warm-up on."""

    def after_warmup(self, step: int, warmup_steps: int, total_steps: int) -> float:
        assert warmup_steps <= step < total_steps
        return 0.5


def test_a_schedule_of_one_s_own_is_warmed_up_without_a_line_for_it():
    assert curve(Halves(warmup=2), 4) == [0.5, 1.0, 0.5, 0.5]


def test_rates_follow_the_batch_by_the_named_rule_and_every_group_its_own_by_the_factor():
    assert Constant().batch_factor(2048) == 1.0
    assert Constant(reference_batch=512, scale="linear").batch_factor(2048) == 4.0
    assert Constant(reference_batch=512, scale="sqrt").batch_factor(2048) == 2.0
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    optimizer = torch.optim.SGD(groups)
    for factor in (0.5, 0.25):
        apply_factor(optimizer, [0.1, 0.02], factor)
        assert [g["lr"] for g in optimizer.param_groups] == [0.1 * factor, 0.02 * factor]


@pytest.mark.parametrize("factor", [-0.5, math.nan])
def test_a_factor_that_is_no_rate_is_refused_before_it_is_used(factor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=rf"^scheduler: `factor` gave {factor}; give a finite"):
        apply_factor(optimizer, [0.1], factor)
    assert optimizer.param_groups[0]["lr"] == 0.1
