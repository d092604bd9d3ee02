"""One word for how far samples depend on each other, with its reason."""

from __future__ import annotations

import pytest
from torch import nn

from trainer.core.coupling import MEAN_OF_MEANS, NONE, Coupling, strictest
from trainer.core.norms import model_coupling


def test_the_strictest_counts_with_groups_that_all_leave_whole():
    four, six, batch = Coupling("group", 4), Coupling("group", 6), Coupling("batch")
    assert strictest(NONE, four, six).size == 12
    assert strictest(four, batch, NONE) == Coupling("batch", 4)
    accepted = Coupling("micro_batch", why="as typed")
    assert strictest(batch, accepted, MEAN_OF_MEANS) == MEAN_OF_MEANS, "which warns"
    assert [each.fixes_cut for each in (NONE, four, batch, accepted)] == [False] * 3 + [True]
    with pytest.raises(ValueError, match="a group has 2 samples or more"):
        Coupling("group")


def test_a_model_declares_what_couples_its_samples_or_is_seen_to():
    frozen, live = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3)
    assert model_coupling(nn.Sequential(nn.LayerNorm(3), frozen)) == NONE
    found = model_coupling(nn.Sequential(frozen, live))
    assert found.why.startswith("1 is BatchNorm")
    assert found.fixes_cut
    live.coupling = Coupling("group", 32)  # one that normalises in groups, whatever it derives from
    assert model_coupling(nn.Sequential(live)) == Coupling("group", 32)
    grouped = nn.Linear(3, 3)
    grouped.coupling = Coupling("group", 3)
    assert model_coupling(nn.Sequential(live, grouped)).size == 96
    assert model_coupling(nn.Sequential(grouped, nn.BatchNorm1d(3))).fixes_cut, "the strictest"
