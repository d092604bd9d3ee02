"""Harness 14: memory that runs out on some ranks is met on all, alike, and none of them hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import (
    Case,
    bytes_around_the_vote,
    evaluate_cramped,
    run_steps,
    strike_each,
    what_is_said,
)
from tests.reliability import lab
from tests.reliability.allocations import PHASES
from trainer.plan.cuts import Fixed

ALLOCATIONS = "tests.reliability.allocations"
WINDOWS = [("ddp", "deferred", 2), ("fsdp", "deferred", 2)]
COPIES = [("hsdp", "deferred", 4)]

EVERYWHERE = [(f"{rank}:1:{n}:{phase}",) for rank in (0, 1) for n in (0, 1) for phase in PHASES]
"""On either rank, in the first or the second micro-batch of the first step: 20 points."""

TOGETHER = [
    ("0:1:0:forward", "1:1:1:middle"),
    ("0:1:1:end", "1:1:0:loss"),
    ("0:1:0:backward", "1:1:0:backward"),
]
"""On both ranks at once, at different micro-batches or the same."""

NUM_POINTS = 4
"""Of the 20, by default."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()


def strike(ranks: Ranks, kind: tuple[str, str, int], strikes: list[tuple[str, ...]]) -> None:
    """Compare runs that ran out of memory in the first step with one that was cut finer."""
    mode, sync, size = kind
    case = Case(
        Fixed(micro=4), mode, sync, dropout=0.3, steps=2, dtype=torch.float32, global_batch=8 * size
    )
    finer = replace(case, cut=Fixed(micro=2))
    for rank, told in enumerate(ranks.run(size, strike_each, case, [(), *strikes])):
        (_, _, coarse), *struck = told
        (_, _, expected) = reference(ranks, size, finer)
        assert coarse != expected
        for points, (replays, cut, digest) in zip(strikes, struck, strict=True):
            about = f"{mode}, {sync}, rank {rank} of {size}, memory ran out at {points}"
            assert replays == [1, 0], about
            assert cut == finer.cut, about
            assert digest == expected, about
    print(f"{mode}, {sync}: {len(strikes)} points on {size} ranks, bit for bit")


KNOWN: dict[str, Any] = {}


def reference(ranks: Ranks, size: int, case: Case) -> Any:
    """Give what a run without a failure ends with, the same on every rank."""
    if repr((size, case)) not in KNOWN:
        told = ranks.run(size, strike_each, case, [()])
        assert len({str(each) for each in told}) == 1
        KNOWN[repr((size, case))] = told[0][0]
    return KNOWN[repr((size, case))]


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_memory_that_runs_out_on_two_ranks_is_replayed_alike(ranks, kind):
    points = Random(str(kind)).sample(EVERYWHERE, NUM_POINTS)
    strike(ranks, kind, [*points, Random(str(kind)).choice(TOGETHER)])


@pytest.mark.parametrize("kind", COPIES, ids=str)
def test_memory_that_runs_out_on_one_of_several_copies_is_replayed_alike(ranks, kind):
    strike(ranks, kind, [("1:1:0:middle",), ("0:1:1:forward", "3:1:0:end")])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [*WINDOWS, *COPIES], ids=str)
def test_memory_that_runs_out_anywhere_is_replayed_alike(ranks, kind):
    strike(ranks, kind, [*EVERYWHERE, *TOGETHER])


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_memory_that_runs_out_twice_is_cut_twice(ranks, kind):
    mode, sync, size = kind
    case = Case(Fixed(micro=8), mode, sync, dropout=0.3, steps=2, dtype=torch.float32)
    strikes = [("0:1:0:middle", "1:2:1:end"), ("1:1:0:loss", "1:2:0:forward")]
    finer = replace(case, cut=Fixed(micro=2))
    (_, _, expected) = reference(ranks, size, finer)
    for told in ranks.run(size, strike_each, case, strikes):
        assert [each[0] for each in told] == [[2, 0]] * len(strikes)
        assert {each[1] for each in told} == {finer.cut}
        assert {each[2] for each in told} == {expected}


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_a_rank_without_micro_batches_replays_with_the_others(ranks, kind):
    mode, sync, _ = kind
    case = Case(
        Fixed(micro=1), mode, sync, steps=2, global_batch=2, normalizer="micro_batches", dropout=0.3
    )
    counts = [told["counts"][0] for told in ranks.run(3, run_steps, case)]
    assert sorted(counts) == [0, 1, 1]
    strikes = [(f"{rank}:1:0:middle",) for rank, count in enumerate(counts) if count]
    (_, _, expected) = reference(ranks, 3, case)
    for told in ranks.run(3, strike_each, case, strikes):
        assert [each[0] for each in told] == [[1, 0]] * 2
        assert {each[2] for each in told} == {expected}


@pytest.mark.parametrize("kind", WINDOWS, ids=str)
def test_one_sample_that_does_not_fit_ends_every_rank_with_5_and_is_named(ranks, kind):
    mode, sync, size = kind
    points = tuple(f"1:{attempt}:0:middle" for attempt in range(1, 9))
    case = Case(Fixed(micro=4), mode, sync, points=points)
    told = ranks.run(size, what_is_said, case)
    assert len(set(told)) == 1
    code, line = told[0]
    assert code == 5
    assert "sample " in line
    assert "tokens does not fit into memory, even alone" in line


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_an_evaluation_short_of_memory_on_one_rank_shrinks_on_all_and_is_exact(ranks, mode):
    size = 4 if mode == "hsdp" else 2
    told = ranks.run(size, evaluate_cramped, mode)
    assert len({str(each) for each in told}) == 1
    metrics, is_as_before = told[0]
    assert is_as_before
    assert metrics["loss"] > 0


def test_the_reduction_of_whole_models_allocates_nothing_once_ranks_have_agreed(ranks):
    (some, after), (all_of_them, after_too) = ranks.run(2, bytes_around_the_vote, "ddp")
    assert after == after_too == []
    assert sum(some) < sum(all_of_them), "the second rank makes room for a whole gradient"


@pytest.mark.parametrize(("mode", "size"), [("fsdp", 2), ("hsdp", 4)])
def test_the_reduction_of_shards_needs_no_more_than_was_there_before_ranks_agreed(
    ranks, mode, size
):
    for before, after in ranks.run(size, bytes_around_the_vote, mode):
        shards = [n for n in after if n * 2 in after]
        assert before[0] >= max(after)
        assert sum(before) >= max(after) + sum(shards)


def launch(folder: Path, mode: str, sync: str, point: str) -> tuple[int, str, float]:
    """Start a run over two ranks as a user does; gives exit code, what it said, and seconds."""
    typed = (
        *(line for line in lab.BASE if not line.startswith(("hooks", "checkpoint", "eval"))),
        f"accum.gradient._target_={ALLOCATIONS}.Struck",
        f"accum.gradient.points=[{point!r}]",
        f"parallel={mode}",
        "parallel.ranks=2",
        f"sync={sync}",
        f"hydra.run.dir={folder}",
    )
    environment = {**os.environ, "PYTHONPATH": str(lab.ROOT), "OMP_NUM_THREADS": "1"}
    with lab.timed() as seconds:
        ended = subprocess.run(
            [sys.executable, "-m", "trainer", *typed],
            cwd=folder.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    return ended.returncode, ended.stdout + ended.stderr, seconds()


IN_THE_REDUCTION = "in the reduction, after the ranks had agreed"
IN_LOCKSTEP = (
    "step 2: out of memory, and sync=immediate reduces in every micro-batch, so the step cannot "
    "be repeated: type accum.micro=2, or sync=deferred"
)


@pytest.mark.parametrize(
    ("mode", "sync", "point", "line"),
    [
        pytest.param(
            *("ddp", "deferred", "1:2:0:reduce", IN_THE_REDUCTION), marks=pytest.mark.nightly
        ),
        ("ddp", "immediate", "1:2:0:middle", IN_LOCKSTEP),
        ("fsdp", "immediate", "0:2:1:forward", IN_LOCKSTEP),
        pytest.param(*("fsdp", "immediate", "1:2:1:end", IN_LOCKSTEP), marks=pytest.mark.nightly),
        pytest.param(
            *("fsdp", "deferred", "0:2:0:reduce", IN_THE_REDUCTION), marks=pytest.mark.nightly
        ),
    ],
)
def test_what_cannot_be_saved_ends_every_rank_with_one_line(tmp_path, mode, sync, point, line):
    code, said, seconds = launch(tmp_path / "run", mode, sync, point)
    assert code == 5, said
    assert line in " ".join(said.split())
    assert "Traceback" not in said
    assert lab.status(tmp_path / "run")["exit_code"] == 5
    print(f"{mode}, {sync}: ended after {seconds:.1f} s")
