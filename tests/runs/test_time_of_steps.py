"""Where the time of a run went, as result.json and the screen have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.lib.run_support import go, read_json
from trainer.core.world import World
from trainer.report.time_table import PARTS
from trainer.training.checkpointing import Checkpointer
from trainer.tune.network import network_of

pytestmark = pytest.mark.usefixtures("own_folder")

TOYS = (
    "model._target_=tests.lib.faulty.SlowNet data._target_=tests.lib.faulty.Rows "
    "objective=classify eval.every=null log.samples=false"
)


def measure(world: World) -> list[Any]:
    rates = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 2.0)
    saved = {"ranks": world.size, "latency_s": 1.0, **rates}
    return [network_of(world), network_of(world, saved), network_of(world, saved | {"ranks": 7})]


def test_every_rank_knows_the_same_network_and_a_resumed_run_the_one_it_began_with(ranks):
    mine, theirs = ranks.run(2, measure)
    assert mine == theirs
    first, saved, again = mine
    rates = (first.all_reduce, first.all_gather, first.reduce_scatter)
    assert min(*rates, first.latency_s) > 0
    assert saved.latency_s == 1.0
    assert again.ranks == 2
    assert network_of(World()) is None


def due(world: World) -> bool:
    """Whether a rank is to save, by a clock that the first rank alone has."""
    kit = SimpleNamespace(world=world, model=SimpleNamespace(module=nn.Linear(1, 1)))
    others: Any = {"feed": None, "reporter": None, "constants": {}}
    every_s, writer = 0.0 if world.is_main else None, SimpleNamespace(has_news=False)
    checkpointer = Checkpointer(kit=kit, writer=writer, every_s=every_s, **others)
    assert not checkpointer.poll(False)
    return checkpointer.is_due


def test_a_checkpoint_that_is_due_by_time_is_so_on_every_rank(ranks):
    assert ranks.run(2, due) == [True, True]


def test_a_run_says_where_its_time_went_and_a_healthy_one_nothing_else():
    result = go(f"{TOYS} +model.sample=0.01").result
    assert result["advice"] == []
    time = result["time"]
    assert set(time["seconds"]) == set(PARTS)
    assert sum(time["share"].values()) == pytest.approx(1, abs=1e-3)
    assert time["steps"] == 5
    assert time["share"]["compute"] > 0.8
    assert time["seconds"]["waiting"] == time["seconds"]["sync"] == 0


def test_a_run_with_a_slow_rank_is_named_with_that_rank_beside_what_was_planned():
    ranks = "parallel.ranks=2 batch.global=16 accum.micro=8"
    folder = go(f"{TOYS} {ranks} +model.pause=0.1 +model.behind=2.5").folder
    result, plan = read_json(folder / "result.json"), read_json(folder / "plan.json")
    (line,) = result["advice"]
    assert line.startswith("waiting: ")
    assert "mostly for rank 1, which computes" in line
    time = result["time"]
    first, second = time["waiting_by_rank"]
    assert first > 0.1 > second
    assert 0 <= time["hidden_share"] <= 1
    assert time["in_flight_seconds"] > 0
    assert time["overlap"].startswith("sync=deferred reduces when all micro-batches")
    assert plan["network"]["ranks"] == 2
    assert [row["policy"] for row in plan["sync_table"]] == ["deferred", "immediate"]
    assert plan["sync_why"].startswith("sync=auto takes deferred: ")
    assert plan["parallel_why"].startswith("parallel=auto chose ddp: memory limit ")
