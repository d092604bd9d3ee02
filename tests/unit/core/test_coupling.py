"""One word for how far samples depend on each other, with its reason."""

import pytest
from torch import nn

from trainer.core.coupling import MEAN_OF_MEANS, NONE, Coupling, model_coupling, strictest


def test_the_strictest_counts_with_groups_that_all_leave_whole():
    four, six, batch = Coupling("group", 4), Coupling("group", 6), Coupling("batch")
    assert strictest(NONE, four, six).size == 12
    assert strictest(four, batch, NONE) == Coupling("batch", 4)
    accepted = Coupling("micro_batch", why="as typed")
    assert strictest(batch, accepted, MEAN_OF_MEANS) == MEAN_OF_MEANS, "which warns"
    assert [each.fixes_cut for each in (NONE, four, batch, accepted)] == [False] * 3 + [True]
    with pytest.raises(ValueError, match="a group has 2 samples or more"):
        Coupling("group")


def test_modules_of_a_model_declare_what_couples_its_samples():
    live, grouped, mixed = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    assert model_coupling(nn.Sequential(nn.LayerNorm(3), live)) == NONE
    live.coupling, grouped.coupling = Coupling("group", 32), Coupling("group", 3)
    assert model_coupling(nn.Sequential(live)) == Coupling("group", 32)
    assert model_coupling(nn.Sequential(live, grouped)).size == 96
    mixed.coupling = Coupling("micro_batch")
    assert model_coupling(nn.Sequential(grouped, mixed)).fixes_cut, "the strictest"
