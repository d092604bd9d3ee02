"""A sharded model that is compiled, or recomputes its blocks, takes the very same steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import MODES, POLICIES, BlockLM, plain
from tests.lib.support import EXACT, Bench
from trainer.core.world import World
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cuts import Fixed
from trainer.training.step import train_step

STEPS = 2


def trained(world: World, variant: str, sync: str) -> dict[str, np.ndarray]:
    """The weights after some steps."""

    def model() -> BlockLM:
        module = BlockLM()
        assert variant != "recomputing" or checkpoint_blocks(module)
        return module

    bench = Bench(
        Fixed(micro=3), model=model, world=world, lay_out=MODES["fsdp"], sync=POLICIES[sync]()
    )
    if variant == "compiled":
        # Everything that a compiler sees of FSDP2, without the minutes its code generation takes.
        bench.module.compile(dynamic=True, backend="aot_eager")
    for _ in range(STEPS):
        train_step(bench.kit, bench.feed.next(), bench.feed)
    bench.feed.close()
    return {name: plain(p) for name, p in bench.module.named_parameters()}


def trained_each(world: World, variant: str) -> list[dict[str, np.ndarray]]:
    return [trained(world, variant, sync) for sync in ("deferred", "immediate")]


@pytest.mark.parametrize(
    "variant", ["recomputing", pytest.param("compiled", marks=pytest.mark.nightly)]
)
def test_a_variant_of_a_sharded_model_takes_the_same_steps_under_every_policy(variant):
    group = Ranks()
    try:
        expected = group.run(2, trained, "plain", "deferred")[0]
        for each in group.run(2, trained_each, variant):
            for found in each:
                for name, value in expected.items():
                    np.testing.assert_allclose(
                        found[name], value, rtol=EXACT[torch.float64], atol=1e-13
                    )
    finally:
        group.close()
