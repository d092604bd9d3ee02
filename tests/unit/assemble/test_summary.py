"""A run is described in rows, whose texts and values are of the same facts."""

import pytest

from trainer.assemble.summary import batch_equation
from trainer.core.rows import record_of, row


@pytest.mark.parametrize(
    ("counts", "ranks", "steps", "whole", "expected"),
    [
        ([32, 96, 384], 1, 3, None, "512 samples = 1 rank x 3 micro-batches of 32 to 384 samples"),
        (
            *([32, 96, 384], 2, 2, None),
            "512 samples = 3 micro-batches over 2 ranks, at most 2 each of 32 to 384 samples",
        ),
        ([64] * 8, 2, 4, None, "512 samples = 2 ranks x 4 micro-batches x 64 samples"),
        ([8], 1, 1, "9 tokens", "9 tokens = 1 rank x 1 micro-batch of 8 samples"),
    ],
)
def test_the_batch_equation_is_true_for_every_cut(counts, ranks, steps, whole, expected):
    assert batch_equation(counts, ranks, steps, whole) == expected


def test_rows_together_are_a_record_and_two_do_not_give_one_value():
    rows = [row("lr", "0.1", lr=0.1), row(steps=3)]
    assert record_of(rows) == {"lr": 0.1, "steps": 3}
    with pytest.raises(AssertionError, match="lr"):
        record_of([*rows, row(lr=0.2)])
