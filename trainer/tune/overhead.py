"""What a micro-batch takes however small it is: kernels to launch, graphs to build."""

from __future__ import annotations

from trainer.core.out_of_memory import AllocationGuard
from trainer.plan.memory import Shape
from trainer.tune.speed import meter_for, rehearsal
from trainer.tune.workload import Workload

ROUNDS = 5
"""The quickest of them counts; the first warms up."""

LARGER = 4
"""Samples of the larger micro-batch, over those of the smaller."""


def fixed_share(work: Workload, shape: Shape) -> float | None:
    """Time two shapes of one length, and tell what share does not grow with the number of samples.

    The line through them meets zero samples at `t + (t - T) / (LARGER - 1)`. Weights, gradients
    and generators are left as they were.

    Args:
        work: what a rank computes.
        shape: the smaller of the two.

    Returns:
        Of the smaller one's forward and backward, in [0, 1]; None where memory runs out.
    """
    meter = meter_for(work.device)
    shapes = (shape, Shape(LARGER * shape.num_samples, shape.length))
    best = [float("inf"), float("inf")]
    with AllocationGuard() as guard, rehearsal(work, recompute=False) as prepare:
        runs = [prepare(each) for each in shapes]
        for _ in range(ROUNDS):
            for index, run in enumerate(runs):
                started = meter()
                run()
                best[index] = min(best[index], meter() - started)
    small, large = best
    if guard.failed:
        return None
    return min(1.0, max(0.0, 1.0 + (1.0 - large / small) / (LARGER - 1)))
