"""A warm-up in samples or tokens ends with the step that has trained on as many."""

import numpy as np
import pytest

from trainer.core.errors import ConfigError
from trainer.optim.schedules import WSD, Cosine, InverseSqrt, with_length_steps
from trainer.plan.batch_size import ConstantSize
from trainer.plan.lengths import Lengths
from trainer.plan.order import Order

LENGTHS = np.random.default_rng(0).integers(1, 40, 22)


@pytest.mark.parametrize(("unit", "size"), [("tokens", 8), ("samples", 60)])
def test_the_step_that_reaches_the_amount_is_the_first_at_the_full_rate(unit, size):
    # Epochs end with a short step, and steps in tokens are ragged, so that no quotient is right.
    counted = "samples" if size == 8 else "tokens"
    lengths = Lengths.of(LENGTHS)
    order = Order(len(LENGTHS), 0, ConstantSize(global_batch=size), counted, "keep", lengths)
    passed, cursor = [0], order.start
    for _ in range(9):
        batch = order.next(cursor)
        passed.append(
            passed[-1] + (len(batch.ids) if unit == "samples" else LENGTHS[batch.ids].sum())
        )
        cursor = batch.after
    for step in (1, 4, 9):
        for amount in (passed[step - 1] + 1, passed[step]):
            asked = Cosine(warmup=f"{amount}{unit}")
            found = with_length_steps(asked, order, lengths, 12)
            assert found == Cosine(warmup=step)
            assert found.factor(step - 1, 12) == 1.0
            asked = WSD(decay=f"{passed[9] - passed[step - 1]}{unit}")  # back from the last step
            assert with_length_steps(asked, order, lengths, 9) == WSD(decay=10 - step)
            asked = InverseSqrt(warmup=1, timescale=f"{passed[step] - passed[1]}{unit}")
            if step > 1:  # behind the warm-up, and behind the end of the run too
                found = with_length_steps(asked, order, lengths, 3)
                assert found == InverseSqrt(warmup=1, timescale=step - 1)
    thousand = with_length_steps(Cosine(warmup=f"0.009k{unit}"), order, lengths, 12)
    assert thousand == with_length_steps(Cosine(warmup=f"9{unit}"), order, lengths, 12)
    assert with_length_steps(Cosine(warmup=0.1), order, lengths, 12) == Cosine(warmup=0.1)
    with pytest.raises(ConfigError, match=rf"^scheduler\.warmup=1M{unit}: exceeds the \d+ {unit}"):
        with_length_steps(Cosine(warmup=f"1M{unit}"), order, lengths, 12)
