"""The figures of a step."""

import numpy as np

from trainer.training.loop import ModelFlops


def test_a_step_counts_its_real_tokens_and_their_pairs_within_samples():
    lengths = np.array([64, 1, 17, 17, 40])
    found = ModelFlops(per_token=2.0, per_pair=3.0).speed(lengths, 1.0)
    pairs = sum(int(n) ** 2 for n in lengths)
    assert found == {"model_flops_per_second": 2 * 139 + 3 * pairs}
    linear = ModelFlops(per_token=1.0, peak=556.0)
    assert linear.speed(lengths, 0.5) == {"model_flops_per_second": 278.0, "mfu": 0.5}
