"""Where the time of a run went, as result.json and the screen have it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.run_support import go, read_json
from trainer.core.world import World
from trainer.report.time_table import PARTS
from trainer.tune.network import network_of

pytestmark = pytest.mark.usefixtures("own_folder")

TOYS = (
    "model._target_=tests.lib.faulty.SlowNet data._target_=tests.lib.faulty.Rows "
    "objective=classify eval.every=null "
)


def measure(world: World) -> list[Any]:
    first = network_of(world)
    assert first is not None
    saved = {"ranks": world.size, "latency_s": 1.0} | dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter"), 2.0
    )
    return [first, network_of(world, saved), network_of(world, saved | {"ranks": 7})]


def test_every_rank_knows_the_same_network_and_a_resumed_run_the_one_it_began_with(ranks):
    mine, theirs = ranks.run(2, measure)
    assert mine == theirs
    measured, saved, again = mine
    rates = (measured.all_reduce, measured.all_gather, measured.reduce_scatter)
    assert min(*rates, measured.latency_s) > 0
    assert saved.latency_s == 1.0
    assert again.ranks == 2
    assert network_of(World()) is None


def ended(line: str) -> dict[str, Any]:
    """What result.json says of a run of slow classes."""
    return read_json(go(f"{TOYS} log.samples=false {line}").folder / "result.json")


def test_a_run_says_where_its_time_went_and_a_healthy_one_nothing_else():
    result = ended("+model.sample=0.01")
    assert result["advice"] == []
    time = result["time"]
    assert set(time["seconds"]) == set(PARTS)
    assert sum(time["share"].values()) == pytest.approx(1, abs=1e-3)
    assert time["steps"] == 5
    assert time["share"]["compute"] > 0.8
    assert time["seconds"]["waiting"] == time["seconds"]["sync"] == 0


@pytest.mark.nightly
def test_a_run_whose_data_are_slow_is_named(capfd):
    result = ended("+data.pause=0.03")
    (line,) = result["advice"]
    assert line.startswith("data: ")
    assert result["time"]["share"]["data"] > 0.5
    assert "-> data: " in capfd.readouterr().out


RANKS = "parallel.ranks=2 batch.global=16 accum.micro=8"


def test_a_run_with_a_slow_rank_is_named_with_that_rank():
    result = ended(f"{RANKS} +model.pause=0.15 +model.behind=1.5")
    (line,) = result["advice"]
    assert line.startswith("waiting: ")
    assert "mostly for rank 1, which computes" in line
    first, second = result["time"]["waiting_by_rank"]
    assert first > 0.1 > second


@pytest.mark.nightly
def test_a_run_whose_reductions_are_slow_is_named():
    run = go(f"{TOYS} {RANKS} +model.pause=0.1 +model.carry=0.2")
    result = read_json(run.folder / "result.json")
    (line,) = result["advice"]
    assert line.startswith("sync: ")
    assert ", predicted " in line
    plan = read_json(run.folder / "plan.json")
    assert plan["network"]["ranks"] == 2
    assert [row["policy"] for row in plan["sync_table"]] == ["deferred", "immediate"]
    assert plan["sync_why"].startswith("sync=auto takes deferred, one reduction a step")
    assert plan["parallel_why"].startswith("parallel=auto takes ddp: of ")
    assert 0 <= result["time"]["hidden_share"] <= 1
    assert result["time"]["in_flight_seconds"] > 0
    assert result["time"]["overlap"].startswith("sync=deferred reduces when all micro-batches")
