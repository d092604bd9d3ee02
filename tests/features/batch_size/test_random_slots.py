"""A plan with random micro-batches holds the same samples, and needs no more memory than before."""

import numpy as np
import pytest

from trainer.features.batch_size.random_slots import with_random_slots
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget

RAGGED = np.exp(np.random.default_rng(0).normal(3.0, 0.8, 256)).astype(np.int64) + 1
LAYOUTS = {
    "packed": Layout(packed=True),
    "lockstep": Layout(world_size=3, lockstep=True),
    "groups": Layout(group_size=6, world_size=2),
    "many ranks": Layout(world_size=64),
    "compiled": Layout(shapes=(16, 64, 512)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_few_micro_batches_of_every_rank_are_random_and_the_others_are_cut_as_before(layout):
    cut = Budget(max_tokens=2000)
    plan = cut.cut(RAGGED, layout)
    found = with_random_slots(plan, cut, layout, "key")
    found.check(layout)
    assert found.max_positions <= cut.max_tokens
    own = [found.positions(r, s) for r, s in found.slots() if s < found.random_slots]
    assert max(own) <= plan.max_positions
    first = [slot for own in found.ranks for slot in own[: found.random_slots]]
    assert len(first) == found.random_slots * layout.world_size >= 2
    assert len({len(slot) for slot in first}) == 1
    drawn = np.concatenate(first)
    assert len(drawn) <= max(layout.world_size * layout.group_size, len(RAGGED) // 8)
    other = with_random_slots(plan, cut, layout, "other key")
    assert not np.array_equal(drawn, np.concatenate([own[0] for own in other.ranks]))
    assert RAGGED[drawn].std() > 0.3 * RAGGED.std()  # and not alike, as those of the cut
