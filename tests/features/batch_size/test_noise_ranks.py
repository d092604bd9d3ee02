"""Every layout and sync policy measures the noise scale that one rank measures."""

import pytest

from tests.lib.nightly import nightly
from tests.lib.noise_toys import measure_each
from trainer.core.world import World

WAYS = {
    2: [
        *(("ddp", "deferred"), ("ddp", "immediate"), ("small buckets", "overlapped")),
        *(("fsdp", "deferred"), ("fsdp", "immediate"), ("ordered", "deferred")),
    ],
    4: [("hsdp", "hierarchical"), ("hsdp", "deferred"), ("ddp", "deferred")],
}


@pytest.mark.parametrize("size", [2, nightly(4)])
def test_any_number_of_ranks_measures_what_one_does(ranks, size):
    (alone,) = measure_each(World(), [("ddp", "deferred")], 5)
    assert alone > 0
    for found in ranks.run(size, measure_each, WAYS[size], 5):
        assert found == pytest.approx([alone] * len(WAYS[size]), rel=1e-9)
