"""Where the time of a run went, and what is said of it: each fault by its own name, or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.ranks_support import Ranks
from tests.lib.run_support import go, read_json
from trainer.build.parallel import ParallelSetup
from trainer.commands.diagnosis import Facts, diagnose
from trainer.core.phases import HostClock, PhaseTimes, Spending, Spent
from trainer.core.world import World
from trainer.parallel.sync import Deferred, Immediate
from trainer.plan.cut import Cost
from trainer.plan.traffic import Bulk, Network, Work
from trainer.report.breakdown import Breakdown, Effort, RankSplit, heard, split, told
from trainer.tune.network import network_of

ROOT = Path(__file__).parents[2]
PARTS = ("data", "compute", "sync", "optimizer", "waiting", "rest")
NETWORK = Network(ranks=4, latency_s=1e-4, all_reduce=1e9, all_gather=1e9, reduce_scatter=1e9)
BULK = Bulk(mode="fsdp", model_bytes=10**8, shard=4, replicas=1, groups=8, limit_bytes=10**12)


def fsdp(sync=None, micro_batches: int = 8) -> ParallelSetup:
    typed = ParallelSetup(mode="fsdp", replicas=1, sync=sync or Deferred(), bulk=BULK)
    return typed.weighed(Work(micro_batches=micro_batches), NETWORK)


EFFORT = Effort(steps=100, micro_batches=800, positions=80_000, squares=8e6)
HEALTHY = Facts(
    breakdown=Breakdown(
        steps=100, ranks=(RankSplit(compute=1.0, sync=0.05, optimizer=0.05, data=0.01),) * 4
    ),
    efforts=(EFFORT,) * 4,
    cost=Cost(),
    imbalance=0.01,
    num_workers=0,
    parallel=fsdp(),
    fixed_share=0.01,
    cut="auto",
)


def with_ranks(*ranks: Mapping[str, float], **changes: Any) -> tuple[str, ...]:
    """What is said of a run whose ranks differ from the healthy one's in some parts."""
    healthy = HEALTHY.breakdown.ranks[0]
    breakdown = replace(
        HEALTHY.breakdown, ranks=tuple(replace(healthy, **parts) for parts in ranks)
    )
    efforts = changes.pop("efforts", (EFFORT,) * len(ranks))
    return diagnose(replace(HEALTHY, breakdown=breakdown, efforts=efforts, **changes))


def test_a_healthy_run_is_told_nothing():
    assert diagnose(HEALTHY) == ()


def test_what_costs_less_than_half_a_second_in_all_is_not_worth_a_word():
    late = [{"data": 0.5}] * 4
    assert with_ranks(*late)
    brief = replace(HEALTHY.breakdown, steps=1, ranks=(RankSplit(compute=0.3, data=0.3),))
    assert diagnose(replace(HEALTHY, breakdown=brief, efforts=(EFFORT,))) == ()


def test_data_that_are_late_ask_for_workers():
    (line,) = with_ranks(*[{"data": 0.5}] * 4)
    assert line.startswith("data: 31.2% of a step (500 ms) is waiting for samples: num_workers=")
    assert "(now 0)" in line
    (line,) = with_ranks(*[{"data": 0.5}] * 4, num_workers=3)
    assert "num_workers=6" in line


def test_a_rank_whose_data_are_late_is_named_and_those_who_wait_for_it_are_not_blamed():
    (line,) = with_ranks({"waiting_before": 0.6}, {"data": 0.6}, {"waiting_before": 0.6})
    assert "the samples of rank 1, which take 600 ms" in line


def test_a_rank_that_is_slow_at_equal_tokens_is_named():
    waits = {"compute": 1.0, "waiting_after": 0.3}
    (line,) = with_ranks(waits, waits, {"compute": 1.3}, waits)
    assert "rank 2 computes 30.0% slower than the others at equal tokens" in line


def test_a_rank_that_takes_a_hundred_times_as_long_is_not_told_in_percent():
    waits = {"compute": 1.0, "waiting_after": 100.0}
    (line,) = with_ranks(waits, waits, {"compute": 101.0}, waits)
    assert "rank 2 computes 101x as long as the others at equal tokens" in line


def test_a_rank_that_only_has_more_to_do_is_not_called_slow():
    waits = {"compute": 1.0, "waiting_after": 0.3}
    efforts = (EFFORT, EFFORT, replace(EFFORT, positions=113_000, squares=11.3e6), EFFORT)
    given = {"efforts": efforts, "imbalance": 0.2}
    (line,) = with_ranks(waits, waits, {"compute": 1.3}, waits, cut="fixed", **given)
    assert "the cut gives them unequal lengths" in line
    assert "accum=auto" in line
    (line,) = with_ranks(waits, waits, {"compute": 1.3}, waits, parallel=fsdp(Immediate()), **given)
    assert "sync=deferred lets ranks take different numbers" in line


def test_ranks_that_are_slow_in_turn_are_told_apart_from_one_that_always_is():
    (line,) = with_ranks(*[{"compute": 1.0, "waiting_after": 0.3}] * 3)
    assert "in bursts" in line


def test_many_reductions_a_step_where_one_would_do_are_named():
    parallel = fsdp(Immediate())
    (line,) = with_ranks(*[{"sync": 1.9}] * 4, parallel=parallel)
    assert "1.68 GiB sent" in line
    assert "sync=deferred sends 143 MiB, in one reduction a step" in line


def test_a_network_slower_than_it_was_at_the_start_is_told_from_one_that_is_only_slow():
    (line,) = with_ranks(*[{"sync": 1.9}] * 4)
    assert "the network measured at the start would carry that in 152 ms" in line
    (line,) = with_ranks(*[{"sync": 0.2}] * 4)
    assert "a larger batch.global needs it less often" in line


def test_micro_batches_that_are_mostly_overhead_are_named_with_a_size_that_pays():
    facts = replace(HEALTHY, fixed_share=0.64, cut="fixed")
    (line,) = diagnose(facts)
    assert "a rank computes 8 a step, of 125 ms each, of which 80 ms do not depend" in line
    assert "accum.micro 8 times as large" in line
    (line,) = diagnose(replace(facts, cut="budget"))
    assert "accum.max_tokens" in line
    (line,) = diagnose(replace(facts, cut="auto"))
    assert "more accum.memory" in line
    assert diagnose(replace(facts, cut="auto", is_tight=False)) == ()


@pytest.mark.parametrize("count", [1, 8])
def test_a_single_micro_batch_cannot_be_too_small(count):
    one = replace(EFFORT, micro_batches=100 * count)
    found = diagnose(replace(HEALTHY, fixed_share=0.8, efforts=(one,) * 4, cut="fixed"))
    assert bool(found) is (count > 1)


def test_what_a_rank_waits_for_is_not_hidden_and_what_travels_meanwhile_is():
    clock = Late()
    clock.passed = float("inf")
    times = PhaseTimes(clock)
    for _ in range(3):
        for phase in ("data", "compute", "reduce"):
            times.enter(phase)
        first, second = times.mark(), times.mark()  # two at once
        times.flew(first, times.mark())
        times.flew(second, times.mark())
    times.enter("data")
    found = times.spending()
    assert found.steps == 2, "the first warms up"
    # One lands after 3 s, the other 2 s later; either is waited for in its last second.
    assert (found.in_flight, found.waited) == (2 * 5, 2 * 2)
    (rank, _) = heard([told(found, EFFORT)] * 2)[0].ranks
    assert (rank.in_flight, rank.unhidden) == (5, 2)
    breakdown = split([found, found])
    assert breakdown.hidden == pytest.approx(0.6)
    assert breakdown.to_json()["hidden_share"] == 0.6


def test_a_rank_alone_has_nothing_to_hide():
    assert HEALTHY.breakdown.hidden is None


class Late:
    """A clock whose marks lie ahead until they are let pass, as events of a stream do."""

    def __init__(self) -> None:
        self.now, self.passed = 0.0, 0.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def between(self, before: float, after: float) -> float | None:
        return after - before if after <= self.passed else None


STEP = ("data", "weigh", "gather", "compute", "agree", "reduce", "update", "report")


def test_a_phase_counts_when_its_end_has_passed_on_the_device_and_not_before():
    clock = Late()
    times = PhaseTimes(clock)
    for phase in STEP * 3:
        times.enter(phase)
    assert times.spending().phases == {}
    clock.passed = clock.now
    found = times.spending()
    assert found.steps == 2
    assert {name: spent.seconds for name, spent in found.phases.items()} == {
        **dict.fromkeys(STEP, 2.0),
        "report": 1.0,
    }


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_first_step_warms_up_and_counts_only_where_there_is_no_other(num_steps):
    clock = Late()
    clock.passed = float("inf")
    times = PhaseTimes(clock)
    for phase in (*STEP * num_steps, "end"):
        times.enter(phase)
    found = times.spending()
    assert found.steps == max(1, num_steps - 1)
    assert found.phases["compute"] == Spent(float(found.steps), found.steps, 1.0)


SECONDS = st.floats(0, 10)


@given(st.lists(st.tuples(*[SECONDS] * len(STEP)), min_size=1, max_size=5), st.integers(1, 9))
def test_the_parts_of_every_rank_add_up_to_its_step(ranks, steps):
    spendings = [
        Spending(
            steps=steps,
            phases={n: Spent(s, steps, s / steps) for n, s in zip(STEP, seconds, strict=True)},
        )
        for seconds in ranks
    ]
    breakdown = split(spendings)
    for rank, seconds in zip(breakdown.ranks, ranks, strict=True):
        assert sum(getattr(rank, n) for n in PARTS) == pytest.approx(sum(seconds) / steps)
        assert min(rank.waiting_before, rank.waiting_after, rank.sync) >= -1e-9
    assert breakdown.step_seconds == pytest.approx(sum(map(sum, ranks)) / steps / len(ranks))


def test_what_a_rank_tells_is_read_as_it_was_said():
    times = PhaseTimes(HostClock())
    for phase in (*STEP, *STEP, "end"):
        times.enter(phase)
    words = json.loads(json.dumps([told(times.spending(), EFFORT)] * 2))
    breakdown, efforts = heard(words)
    assert efforts == (EFFORT, EFFORT)
    assert breakdown.steps == 1
    assert breakdown.ranks[0] == breakdown.ranks[1]


def measure(world: World) -> list[Any]:
    first = network_of(world)
    assert first is not None
    saved = {"ranks": world.size, "latency_s": 1.0} | dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter"), 2.0
    )
    others = [network_of(world, saved), network_of(world, saved | {"ranks": 7})]
    return [first, *others, network_of(world, saved, shard=2) if world.size > 2 else None]


def test_every_rank_knows_the_same_network_and_a_resumed_run_the_one_it_began_with():
    group = Ranks()
    try:
        mine, theirs = group.run(2, measure)
        four = group.run(4, measure)
    finally:
        group.close()
    assert mine == theirs
    assert all(each == four[0] for each in four)
    assert four[0][-1].shard == 2, "within copies and between them, each on its own"
    assert min(four[0][-1].across_latency_s, four[0][-1].all_reduce) > 0
    assert four[0][0].across_latency_s is None
    measured, kept, again, _ = mine
    rates = (measured.all_reduce, measured.all_gather, measured.reduce_scatter)
    assert min(*rates, measured.latency_s) > 0
    assert kept.latency_s == 1.0
    assert again.ranks == 2
    assert network_of(World()) is None


def ended(line: str) -> dict[str, Any]:
    """What result.json says of a run of slow toys on one rank."""
    toys = "tests.lib.slow_toys"
    named = f"model._target_={toys}.SlowNet data._target_={toys}.SlowRows objective=classify"
    run = go(f"{named} eval.every=null log.samples=false {line}")
    return read_json(run.folder / "result.json")


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
def test_a_run_whose_data_are_slow_is_told_so(capfd):
    result = ended("+data.pause=0.03")
    (line,) = result["advice"]
    assert line.startswith("data: ")
    assert result["time"]["share"]["data"] > 0.5
    assert "-> data: " in capfd.readouterr().out


def test_a_run_of_tiny_micro_batches_is_told_so():
    result = ended("+model.each=0.025 accum.micro=1")
    (line,) = result["advice"]
    assert line.startswith("micro-batches: a rank computes 8 a step")
    assert "accum.micro 8 times as large" in line


def on_two_ranks(folder: Path, *typed: str) -> dict[str, Any]:
    """What result.json says of a run of slow toys on two ranks, as a user starts it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "lib")])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = (
        "model._target_=slow_toys.SlowNet data._target_=slow_toys.SlowRows objective=classify "
        "batch.global=16 accum=fixed accum.micro=8 steps=6 parallel.ranks=2 wandb.mode=disabled "
        "eval.every=null"
    )
    subprocess.run(
        [sys.executable, "-m", "trainer", *words.split(), f"hydra.run.dir={folder}", *typed],
        cwd=folder.parent,
        env=environ,
        check=True,
        capture_output=True,
    )
    return read_json(folder / "result.json")


def test_a_run_with_a_slow_rank_is_told_which(tmp_path):
    result = on_two_ranks(tmp_path / "run", "+model.pause=0.15", "+model.behind=1.5")
    (line,) = result["advice"]
    assert line.startswith("waiting: ")
    assert "rank 1 computes" in line
    first, second = result["time"]["waiting_by_rank"]
    assert first > 0.1 > second


@pytest.mark.nightly
def test_a_run_whose_reductions_are_slow_is_told_so(tmp_path):
    result = on_two_ranks(tmp_path / "run", "+model.pause=0.1", "+model.carry=0.2")
    (line,) = result["advice"]
    assert line.startswith("sync: ")
    assert "the network measured at the start would carry that in" in line
    plan = read_json(tmp_path / "run" / "plan.json")
    assert plan["network"]["ranks"] == 2
    assert [row["policy"] for row in plan["sync_table"]] == ["deferred", "immediate"]
    assert plan["sync_why"].startswith("sync=auto takes deferred: one reduction a step")
    assert plan["parallel_why"].startswith("parallel=auto takes ddp: a whole copy on every rank")
    assert 0 <= result["time"]["hidden_share"] <= 1
    assert result["time"]["in_flight_seconds"] > 0
    assert result["time"]["overlap"].startswith("sync=deferred reduces when all micro-batches")
