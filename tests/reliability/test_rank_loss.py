"""Harnesses 18, 19 and 20: a rank dies, hangs or falls out of step; nothing stays, all is said.

Every case is a real command with two ranks over gloo. Its strike is at a stated step and phase.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.reliability import lab
from tests.reliability.rank_runs import Ended, RankRun
from tests.reliability.support import cases, replay

STEPS = {"start": 0, "evaluation": 3, "saving": 4, "end": 7}
PHASES = (
    *("update", "start", "data", "compute", "gather", "agree", "reduce", "normalizer", "report"),
    *("evaluation", "saving", "end"),
)
KINDS = ("SIGKILL", "exception", "exit")
DEATHS = [
    f"{KINDS[(number + turn) % 3]}@{phase}:{STEPS.get(phase, 3)}@{(number + 1 + turn) % 2}"
    for turn in range(2)
    for number, phase in enumerate(PHASES)
]
"""Every phase twice, on each rank, in another way."""
CAUSES = {
    "SIGKILL": "killed by SIGKILL",
    "exception": "ArithmeticError: injected",
    "exit": "code 3",
}

HANGS = (
    *("SIGSTOP@compute:3@1", "sleep@compute:3@0", "skip@normalizer:3@1", "SIGSTOP@data:3@0"),
    *("skip@reduce:3@0", "SIGSTOP@update:3@1", "SIGSTOP@agree:3@1", "skip@agree:3@1"),
    *("SIGSTOP@reduce:3@1", "skip@report:3@0"),
)
TIME_LIMIT_S = 5.0
SLACK_S = float(os.environ.get("RELIABILITY_SLACK_S", "10"))
"""Added to every limit of time, for machines that have other work."""


def assert_ends_in_order(run: RankRun, ended: Ended, about: str, words: Sequence[str]) -> None:
    """One end, one code, few lines that name all there is to know, and nothing left."""
    assert ended.code == 7, f"{about}: {ended}"
    assert len(ended.errors) <= 3, f"{about}: {ended}"
    assert all(word in ended.errors[-1] for word in words), f"{about}: {words}, {ended}"
    assert lab.status(run.folder)["exit_code"] == 7, about
    run.assert_none_left(about)


def struck(
    strikes: Sequence[str], count: int, tmp_path: Path, *typed: str
) -> Iterator[tuple[RankRun, Ended, str, tuple[str, str, str]]]:
    """Let some runs be struck; of each its end, what it is about, and strike, rank and place."""
    for case, _ in cases(count):
        strike = strikes[case % len(strikes)]
        kind, place, rank = strike.split("@")
        phase, _, step = place.partition(":")
        run = RankRun.start(tmp_path / f"run{case}", *typed, STRIKES=strike)
        ended = run.end()
        where = f"step {step} ({phase}" if step != "0" else "the start"
        yield run, ended, f"{replay(case)}: {strike}", (kind, rank, where)


def let_die(count: int, tmp_path: Path) -> None:
    took = []
    for run, ended, about, (kind, rank, where) in struck(DEATHS, count, tmp_path):
        assert_ends_in_order(run, ended, about, (f"rank {rank}", where, CAUSES[kind]))
        took.append(ended.at - run.struck_at())
        print(f"{about}: {took[-1]:.1f} s")
        assert took[-1] < 10 + SLACK_S, about
    print(f"{len(took)} deaths: exit 7, at most 3 lines, none left; {max(took):.1f} s at most")


def test_a_rank_that_dies_anywhere_ends_the_run_and_is_named(tmp_path: Path) -> None:
    let_die(2, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_deaths_in_every_phase_of_either_rank(tmp_path: Path) -> None:
    let_die(len(DEATHS), tmp_path)


@pytest.mark.parametrize(
    "moment",
    [
        "run/metrics.jsonl",
        pytest.param("run/status.json", marks=pytest.mark.nightly),
        pytest.param("run/checkpoints/step-*", marks=pytest.mark.nightly),
        pytest.param("run/result.json", marks=pytest.mark.nightly),
    ],
)
def test_no_rank_outlives_a_command_that_is_killed(moment: str, tmp_path: Path) -> None:
    run = RankRun.start(tmp_path / "run", "model.pause=0.05", "steps=40")
    run.wait_for(moment)
    run.process.send_signal(signal.SIGKILL)
    assert run.end().code == -signal.SIGKILL
    run.assert_none_left(moment)


def let_hang(count: int, tmp_path: Path) -> None:
    took, limit = [], f"parallel.timeout_s={TIME_LIMIT_S}"
    for run, ended, about, (kind, rank, where) in struck(HANGS, count, tmp_path, limit):
        words = (f"rank {rank}", where) if kind != "skip" else ("rank", "step")
        assert_ends_in_order(run, ended, about, words)
        took.append(ended.at - run.struck_at())
        assert took[-1] < TIME_LIMIT_S + 2 + SLACK_S, f"{about}: {took[-1]}"
        stacks = "".join(path.read_text() for path in (run.folder / "errors").glob("rank*.txt"))
        assert re.search(r'File ".*", line \d+', stacks), about
        if kind != "skip":
            own = (run.folder / "errors" / f"rank{rank}.txt").read_text()
            assert "in happen" in own, f"{about}: {own}"
    print(f"{len(took)} hangs, limit {TIME_LIMIT_S:g} s: ended after {max(took):.1f} s at most")


def test_a_rank_that_hangs_or_skips_a_collective_is_named_within_its_limit(tmp_path: Path) -> None:
    let_hang(1, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_hangs_in_every_phase(tmp_path: Path) -> None:
    let_hang(len(HANGS), tmp_path)


def restart(count: int, tmp_path: Path) -> None:
    undisturbed = RankRun.start(tmp_path / "undisturbed", "model.dropout=0.1")
    assert undisturbed.end().code == 0
    expected = lab.outcome(undisturbed.folder, rng=False)
    for case, chance in cases(count):
        phase = chance.choice(PHASES)
        step = STEPS.get(phase, chance.randint(1, 7))
        strikes = [f"{KINDS[case % 3]}@{phase}:{step}@{chance.randint(0, 1)}"]
        if case % 2:
            strikes.append(f"SIGKILL@reduce:{chance.randint(5, 7)}@{chance.randint(0, 1)}")
        run = RankRun.start(
            tmp_path / f"run{case}",
            *("model.dropout=0.1", "parallel.max_restarts=3"),
            STRIKES=" ".join(strikes),
        )
        ended = run.end()
        about = f"{replay(case)}: {strikes}"
        assert ended.code == 0, f"{about}: {ended}"
        happened = len(list((run.place / "marks").iterdir()))
        assert len(ended.errors) == happened >= 1, f"{about}: {ended}"
        lab.assert_same(lab.outcome(run.folder, rng=False), expected, about)
        run.assert_none_left(about)
    print(f"{count} runs with deaths were started again, all equal to the undisturbed one")


def test_a_run_that_loses_ranks_starts_again_and_ends_as_if_nothing_was(tmp_path: Path) -> None:
    restart(1, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_runs_that_lose_ranks_start_again(tmp_path: Path) -> None:
    restart(10, tmp_path)
