"""The loss scale of fp16: it rounds nothing, acts once a step, and gives way without failing."""

from dataclasses import replace

import pytest
import torch

from tests.lib.support import Bench
from trainer.accumulate.loss_scale import GROWTH_STEPS, LossScale
from trainer.accumulate.sum import Sum
from trainer.plan.cuts import Fixed
from trainer.training.step import LOSS_SCALE, NOT_FINITE


def scaled(value: float | None, **changes) -> Bench:
    bench = Bench(Fixed(micro=3), torch.float32, clip_norm=0.1, **changes)
    scale = None if value is None else LossScale(value)
    bench.context = replace(bench.context, loss_scale=scale, parts=[scale] if scale else [])
    return bench


def test_it_changes_no_bit_of_loss_metrics_norm_and_update():
    plain, other = scaled(None), scaled(2.0**16)
    for _ in range(3):
        one, two = plain.step(), other.step()
        assert (one.loss, one.grad_norm, one.metrics) == (two.loss, two.grad_norm, two.metrics)
    pairs = zip(plain.parameters().values(), other.parameters().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert other.context.loss_scale == LossScale(2.0**16, good_steps=3)


class Overflows(Sum):
    """Leaves a gradient as fp16 would that ends at 65,504."""

    def walk(self, model, *given, **how):
        found = super().walk(model, *given, **how)
        for parameter in model.parameters:
            parameter.grad[parameter.grad.abs() > 65504] = torch.inf
        return found


def test_a_gradient_that_is_not_finite_skips_the_step_and_halves_the_scale_until_it_is_one():
    bench = scaled(2.0**24, strategy=Overflows())
    before, reports = bench.parameters(), []
    while not reports or reports[-1].skipped:
        assert all(torch.equal(p, before[n]) for n, p in bench.parameters().items())
        reports.append(bench.step())
    assert {report.skipped for report in reports[:-1]} == {LOSS_SCALE}
    assert bench.context.loss_scale == LossScale(2.0 ** (25 - len(reports)), good_steps=1)
    assert 2 < len(reports) < 20
    assert [report.batch.step for report in reports] == [*range(1, len(reports) + 1)]


def test_at_a_scale_of_one_it_is_the_step_that_fails():
    class Nan(Sum):
        def walk(self, *given, **how):
            found = super().walk(*given, **how)
            return replace(found, loss=found.loss * torch.nan)

    bench = scaled(2.0, strategy=Nan())
    assert [bench.step().skipped for _ in range(3)] == [LOSS_SCALE, NOT_FINITE, NOT_FINITE]


def test_it_doubles_after_many_good_steps_in_a_row():
    scale = LossScale(4.0, good_steps=GROWTH_STEPS - 1)
    scale.after_update(1)
    assert scale == LossScale(8.0)
    scale.after_update(1)
    assert scale.shrink()
    assert scale == LossScale(4.0)
    with pytest.raises(ValueError, match="loss scale"):
        LossScale(float("nan"))
