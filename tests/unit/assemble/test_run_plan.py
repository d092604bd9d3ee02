"""What a run that goes on takes from its checkpoint."""

from __future__ import annotations

from dataclasses import replace

from tests.reliability import lab
from trainer.assemble.components import assemble
from trainer.assemble.run_plan import choose_sync, describe_cut, prepare
from trainer.core.world import World
from trainer.parallel.base import IN_FLIGHT
from trainer.plan.traffic import Network

RATES = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 1e8)
NETWORK = Network(ranks=4, latency_s=1e-3, **RATES)


def test_sync_auto_stays_what_it_was_on_the_same_ranks_while_that_fits():
    config = lab.config("command=plan", "parallel=hsdp", "parallel.ranks=4", "parallel.shard=2")
    parts = assemble(config, World(size=4, local_size=4))
    setup = replace(parts.parallel, network=NETWORK)
    small = replace(setup, sizes=replace(setup.sizes, limit_bytes=0))
    first = choose_sync(prepare(replace(parts, parallel=small)))
    assert first.components.parallel.sync.name == "hierarchical"
    saved = describe_cut(first)
    assert saved["sync"] == ["hsdp", 4, "hierarchical"]

    def chosen(*recorded: object, setup=setup) -> str:
        ready = prepare(replace(parts, parallel=setup))
        return choose_sync(ready, saved | {"sync": [*recorded]}).components.parallel.sync.name

    assert (
        choose_sync(prepare(replace(parts, parallel=setup))).components.parallel.sync.name
        == "deferred"
    )
    assert chosen(*saved["sync"]) == "hierarchical"
    assert chosen("hsdp", 2, "hierarchical") == chosen("fsdp", 4, "hierarchical") == "deferred"
    assert chosen("hsdp", 4, "deferred", setup=small) == "hierarchical", "it does not fit"
    assert chosen("hsdp", 4, "of an earlier version") == "deferred"
    typed = replace(setup, is_open=False)
    assert chosen(*saved["sync"], setup=typed) == "deferred"
    assert describe_cut(prepare(replace(parts, parallel=typed)))["sync"] is None


def test_the_plan_of_whole_copies_counts_the_gradients_that_travel():
    config, found = lab.config("command=plan", "parallel=ddp", "parallel.ranks=2"), []
    for ranks in (1, 2):
        ready = prepare(assemble(config, World(size=ranks, local_size=ranks)))
        found.append(ready.predicted)
    trained = sum(p.nbytes for p in ready.components.module.parameters() if p.requires_grad)
    assert found[1].buffers - found[0].buffers == IN_FLIGHT * trained
    assert found[1].peak_bytes - found[0].peak_bytes == IN_FLIGHT * trained
