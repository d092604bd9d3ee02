"""A sync policy is tried before it trains: what it leaves must be the sum, under every layout."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from tests.lib.ranks_support import Ranks
from tests.lib.run_support import TOYS, go
from tests.lib.run_toys import Averages, Forgets, Halves
from trainer.assemble.parallel import ParallelSetup
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.parallel.fsdp import make_mesh
from trainer.parallel.sync import POLICIES, Deferred, Exact, Hierarchical, Immediate, SyncPolicy
from trainer.parallel.trial import WrongSum, find_wrong_sum

WRONG = (Halves(), Forgets(), Averages())


def tried(world: World, mode: str, policies: tuple[SyncPolicy, ...]) -> list[WrongSum | None]:
    replicas = {"ddp": world.size, "hsdp": 2}.get(mode, 1)
    mesh = None if mode == "ddp" else make_mesh(world, replicas)
    setup, found = ParallelSetup(mode=mode, replicas=replicas, sync=Deferred(), mesh=mesh), []
    for policy in policies:
        mine = replace(setup, sync=policy)
        found.append(find_wrong_sum(policy, lambda m, c, s=mine: s.lay_out(m, c, world), world))
    return found


@pytest.mark.parametrize(
    ("mode", "size", "right"),
    [
        ("ddp", 3, (*(p for p in POLICIES if not isinstance(p, Hierarchical)), Exact())),
        ("fsdp", 2, (Deferred(), Immediate())),
        ("hsdp", 4, (Deferred(), Immediate(), Hierarchical())),
    ],
)
def test_policies_that_leave_no_sum_are_found_and_no_others(mode, size, right):
    # DTensor remembers meshes of process groups that are gone, so these ranks are new.
    with closing(Ranks()) as ranks:
        for found in ranks.run(size, tried, mode, (*right, *WRONG)):
            assert found[: len(right)] == [None] * len(right)
            for wrong, policy in zip(found[len(right) :], WRONG, strict=True):
                assert f"{type(policy).__name__} leaves a gradient that is not" in wrong.text
                assert wrong.error > 0.1


@pytest.mark.nightly
@pytest.mark.usefixtures("own_folder")
def test_a_run_does_not_begin_with_a_policy_that_leaves_no_sum():
    match = "sync: Halves leaves a gradient that is not the sum over 1 micro-batch and 2 ranks"
    with pytest.raises(ConfigError, match=match):
        go(f"sync._target_={TOYS}.Halves parallel.ranks=2")
