"""Harness 14: memory that runs out on some ranks is met on all, in the same way; none hangs."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import (
    Case,
    bytes_around_the_vote,
    evaluated,
    run_steps,
    strike_each,
    what_is_refused,
)
from tests.reliability import lab
from tests.reliability.allocations import PHASES
from tests.reliability.rank_runs import RankRun
from trainer.plan.cuts import Fixed

WINDOWS = [("ddp", "deferred", 2), ("fsdp", "deferred", 2), ("small buckets", "overlapped", 2)]

EVERYWHERE = [(f"{rank}:1:{n}:{phase}",) for rank in (0, 1) for n in (0, 1) for phase in PHASES]
"""On either rank, in the first or the second micro-batch of the first step: 20 points."""

TOGETHER = [
    ("0:1:0:forward", "1:1:1:middle"),
    ("0:1:1:end", "1:1:0:loss"),
    ("0:1:0:backward", "1:1:0:backward"),
]
"""On both ranks at once, at different micro-batches or the same."""


def some(kind: tuple[str, str, int]) -> list[tuple[str, ...]]:
    chance = Random(str(kind))
    return [*chance.sample(EVERYWHERE, 2), chance.choice(TOGETHER)]


@pytest.mark.parametrize(
    ("kind", "strikes"),
    [
        *((kind, some(kind)) for kind in WINDOWS[1:]),
        *(nightly(kind, [*EVERYWHERE, *TOGETHER]) for kind in (*WINDOWS, ("hsdp", "deferred", 4))),
    ],
    ids=str,
)
def test_memory_that_runs_out_on_any_rank_is_replayed_in_the_same_way_on_all(ranks, kind, strikes):
    mode, sync, size = kind
    case = Case(
        Fixed(micro=4), mode, sync, dropout=0.3, steps=2, dtype=torch.float32, global_batch=8 * size
    )
    finer = replace(case, cut=Fixed(micro=2))
    (_, _, expected) = reference(ranks, size, finer)
    for rank, found in enumerate(ranks.run(size, strike_each, case, [(), *strikes])):
        (_, _, coarse), *struck = found
        assert coarse != expected
        for points, (replays, cut, digest) in zip(strikes, struck, strict=True):
            about = f"{mode}, {sync}, rank {rank} of {size}, memory ran out at {points}"
            assert (replays, cut, digest) == ([1, 0], finer.cut, expected), about


def reference(ranks: Ranks, size: int, case: Case) -> Any:
    """Give what a run without a failure ends with, the same on every rank."""
    found = ranks.run(size, strike_each, case, [()])
    assert len({str(each) for each in found}) == 1
    return found[0][0]


@pytest.mark.slow
def test_a_rank_without_micro_batches_replays_with_the_others(ranks):
    how = {"steps": 2, "global_batch": 2, "normalizer": "micro_batches", "dropout": 0.3}
    case = Case(Fixed(micro=1), "fsdp", "deferred", **how)
    counts = [found["counts"][0] for found in ranks.run(3, run_steps, case)]
    assert sorted(counts) == [0, 1, 1]
    strikes = [(f"{rank}:1:0:middle",) for rank, count in enumerate(counts) if count]
    (_, _, expected) = reference(ranks, 3, case)
    for found in ranks.run(3, strike_each, case, strikes):
        assert [each[0] for each in found] == [[1, 0]] * 2
        assert {each[2] for each in found} == {expected}


def test_one_sample_that_does_not_fit_ends_every_rank_with_5_and_is_named(ranks):
    points = tuple(f"1:{attempt}:0:middle" for attempt in range(1, 9))
    case = Case(Fixed(micro=4), "fsdp", "deferred", points=points)
    found = ranks.run(2, what_is_refused, case)
    assert len(set(found)) == 1
    code, line = found[0]
    assert code == 5
    assert "sample " in line
    assert "tokens does not fit into memory, even alone" in line


def test_an_evaluation_short_of_memory_on_one_rank_shrinks_on_all_and_is_exact(ranks):
    found = ranks.run(2, evaluated, "fsdp", 29, 25)
    assert len({str(metrics) for metrics, _, _ in found}) == 1
    for metrics, _, is_as_before in found:
        assert is_as_before
        assert metrics["loss"] > 0


@pytest.mark.slow
def test_the_reduction_of_shards_needs_no_more_than_was_there_before_ranks_agreed(ranks):
    for before, after in ranks.run(2, bytes_around_the_vote, "fsdp"):
        shards = [n for n in after if n * 2 in after]
        assert before[0] >= max(after)
        assert sum(before) >= max(after) + sum(shards)


IN_LOCKSTEP = (
    "step 2: out of memory, and sync=immediate reduces in every micro-batch, so the step cannot "
    "be repeated: type accum=budget accum.max_tokens=10, or type sync=deferred"
)


@pytest.mark.parametrize(
    ("mode", "sync", "point", "line"),
    [
        nightly("fsdp", "immediate", "0:2:1:forward", IN_LOCKSTEP),
        slow("ddp", "immediate", "1:2:0:middle", IN_LOCKSTEP),
        nightly("fsdp", "immediate", "1:2:1:end", IN_LOCKSTEP),
        nightly("fsdp", "deferred", "0:2:0:reduce", "in the reduction, which cannot be repeated"),
    ],
)
def test_what_cannot_be_saved_ends_every_rank_with_one_line(tmp_path, mode, sync, point, line):
    run = RankRun(
        tmp_path,
        *("model._target_=tests.reliability.toys.Net", "accum.micro=3"),
        "accum.gradient._target_=tests.reliability.allocations.Struck",
        *(f"accum.gradient.points=[{point!r}]", f"parallel={mode}", f"sync={sync}"),
    )
    ended = run.end()
    assert ended.code == lab.status(run.folder)["exit_code"] == 5, ended
    assert line in " ".join(ended.errors)
    assert "Traceback" not in " ".join(ended.errors)
