"""A sync policy is tried before it trains: what it leaves must be the sum, under every layout."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from tests.lib.ranks_support import Ranks
from tests.lib.run_toys import Halves
from trainer.assemble.parallel import ParallelSetup
from trainer.core.world import World
from trainer.parallel.fsdp import make_mesh
from trainer.parallel.sync import Deferred, Hierarchical, Immediate, Overlapped, SyncPolicy
from trainer.parallel.trial import WrongSum, find_wrong_sum


def tried(world: World, mode: str, policies: tuple[SyncPolicy, ...]) -> list[WrongSum | None]:
    replicas = {"ddp": world.size, "hsdp": 2}.get(mode, 1)
    mesh = None if mode == "ddp" else make_mesh(world, replicas)
    setup, found = ParallelSetup(mode=mode, replicas=replicas, sync=Deferred(), mesh=mesh), []
    for policy in policies:
        mine = replace(setup, sync=policy)
        found.append(find_wrong_sum(policy, lambda m, c, s=mine: s.lay_out(m, c, world), world))
    return found


@pytest.mark.parametrize(
    ("mode", "size", "policies"),
    [
        ("ddp", 3, (Deferred(), Overlapped(), Immediate(), Halves())),
        ("fsdp", 2, (Deferred(), Immediate(), Halves())),
        ("hsdp", 4, (Deferred(), Immediate(), Hierarchical(), Halves())),
    ],
)
def test_every_policy_leaves_the_sum(mode, size, policies):
    # DTensor remembers meshes of process groups that are gone, so these ranks are new.
    with closing(Ranks()) as ranks:
        assert ranks.run(size, tried, mode, policies) == [[None] * len(policies)] * size
