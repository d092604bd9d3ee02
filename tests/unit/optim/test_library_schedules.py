"""PyTorch's own schedulers are functions of the step, equal to their closed forms."""

import pytest
import torch
from torch.optim import lr_scheduler

from trainer.optim.schedules import OwnScheduler

TOTAL = 40


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (lr_scheduler.StepLR, {"step_size": 7, "gamma": 0.5}),
        (lr_scheduler.MultiStepLR, {"milestones": [5, 20]}),
        (lr_scheduler.LinearLR, {"total_iters": 12}),
        (lr_scheduler.ExponentialLR, {"gamma": 0.97}),
        (lr_scheduler.CosineAnnealingLR, {"T_max": TOTAL}),
        (lr_scheduler.PolynomialLR, {"total_iters": 30, "power": 2.0}),
    ],
)
def test_a_scheduler_is_its_closed_form_whatever_step_is_asked_first(kind, options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    reference = kind(optimizer, **options)
    expected = []
    for reference.last_epoch in range(TOTAL):
        expected.append(reference._get_closed_form_lr()[0] / 0.25)
    assert len(set(expected)) > 1
    order = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(0)).tolist()
    schedule = OwnScheduler(kind=kind, options=options)
    found = {step: schedule.factor(step, TOTAL) for step in order}
    assert [found[step] for step in range(TOTAL)] == pytest.approx(expected, abs=1e-12)
    warm = OwnScheduler(kind=kind, options=options, warmup=4)
    assert [warm.factor(step, TOTAL) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [warm.factor(step, TOTAL) for step in range(4, 30)] == [found[s] for s in range(26)]
