"""A ramp changes the size of steps where so many samples, tokens or epochs are behind."""

import numpy as np
import pytest

from trainer.features.batch_size.ramp import Ramp
from trainer.plan.order import Order

LENGTHS = np.random.default_rng(0).integers(1, 40, 50)


@pytest.mark.parametrize(
    ("at", "stages", "sizes"),
    [
        # Epochs of 50 end with a short step, which the next stage begins behind.
        ("samples", {0: 8, 20: 16, 90: 4}, [8, 8, 8, 16, 16, 16, 16, 16, 4]),
        ("epochs", {0: 20, 0.5: 7, 1: 25}, [20, 20, 7, 7, 25, 25]),
    ],
)
def test_a_step_has_the_size_of_the_last_stage_that_it_has_reached(at, stages, sizes):
    order = Order(50, 0, Ramp(stages=stages, at=at))
    assert order.num_steps(2) == len(sizes)
    found = [order.size_of(cursor) for cursor in order.walk(len(sizes))]
    assert found[:-1] == sizes
    parts = order.stages(len(sizes))
    assert [size for s in parts for size in [s.size] * s.num_steps] == sizes
    assert parts[-1].end.epoch == 2


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_ramp_by_tokens_counts_those_of_the_steps_before(unit):
    sizes = Ramp(stages={0: 5, 300: 20, 700: 9}, at="tokens")
    order, cursor, behind = Order(50, 3, sizes, unit, "keep", LENGTHS), None, 0
    for _ in range(order.num_steps(2)):
        batch = order.next(cursor or order.start)
        expected = 5 if behind < 300 else 20 if behind < 700 else 9
        assert (batch.size, batch.before.tokens) == (expected, behind)
        cursor, behind = batch.after, behind + int(LENGTHS[batch.ids].sum())
    assert behind == 2 * LENGTHS.sum()
