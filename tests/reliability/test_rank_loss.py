"""Harnesses 18, 19, 20 and 27: ranks that die, hang, fall out of step or listen to strangers."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.lib.nightly import counts, nightly, slow
from tests.lib.processes import Ended, typed_over
from tests.lib.run_support import steps
from tests.reliability import lab
from tests.reliability.rank_runs import TYPED, RankRun, processes_in
from tests.reliability.rank_work import run_as_rank
from tests.reliability.support import cases, replay

STEPS = {"start": 0, "evaluation": 3, "saving": 4, "end": 7}
PHASES = (
    *("update", "start", "data", "compute", "gather", "agree", "reduce", "normalizer", "report"),
    *("evaluation", "saving", "end"),
)
KINDS = ("SIGKILL", "exception", "exit")
DEATHS = [
    f"{KINDS[number % 3]}@{phase}:{STEPS.get(phase, 3)}@{(number + 1) % 2}"
    for number, phase in enumerate(PHASES)
]  # every phase once; each way to die occurs twice on each rank
CAUSES = {
    "SIGKILL": "killed by SIGKILL",
    "exception": "ArithmeticError: injected",
    "exit": "code 3",
}

HANGS = (
    *("SIGSTOP@compute:3@1", "sleep@compute:3@0", "skip@normalizer:3@1", "SIGSTOP@agree:3@1"),
    *("skip@reduce:3@0", "SIGSTOP@update:3@1"),
)
TIME_LIMIT_S = 5.0
SLACK_S = float(os.environ.get("RELIABILITY_SLACK_S", "10"))  # for machines with other work


def assert_ends_in_order(
    run: RankRun, ended: Ended, about: str, words: Sequence[str], code: int = 7
) -> None:
    """One end, one code, few lines that name all there is to know, and nothing left."""
    assert ended.code == code, f"{about}: {ended}"
    assert len(ended.errors) <= 4, f"{about}: {ended}"
    named = [line for line in ended.errors if line.startswith("train: error: ")]
    assert all(word in named[-1] for word in words), f"{about}: {words}, {ended}"
    assert lab.status(run.folder)["exit_code"] == code, about
    run.assert_none_left(about)


def struck(
    strikes: Sequence[str], count: int, tmp_path: Path, *typed: str
) -> Iterator[tuple[RankRun, Ended, str, tuple[str, str, str]]]:
    """Let some runs be struck; of each its end, what it is about, and strike, rank and place."""
    for case, _ in cases(count):
        strike = strikes[case % len(strikes)]
        kind, place, rank = strike.split("@")
        phase, _, step = place.partition(":")
        run = RankRun(tmp_path / f"run{case}", *typed, STRIKES=strike)
        ended = run.end()
        where = f"step {step} ({phase}" if step != "0" else "the start"
        yield run, ended, f"{replay(case)}: {strike}", (kind, rank, where)


@pytest.mark.parametrize("count", [nightly(len(DEATHS))])
def test_a_rank_that_dies_anywhere_ends_the_run_and_is_named(count, tmp_path):
    for run, ended, about, (kind, rank, where) in struck(DEATHS, count, tmp_path):
        assert_ends_in_order(run, ended, about, (f"rank {rank}", where, CAUSES[kind]))
        took = ended.at - run.struck_at()
        print(f"{about}: {took:.1f} s")
        assert took < 10 + SLACK_S, about


def test_no_rank_outlives_a_command_that_is_killed(tmp_path):
    run = RankRun(tmp_path / "run", "model.pause=0.05", "steps=40")
    run.wait_for("run/metrics.jsonl")
    run.process.send_signal(signal.SIGKILL)
    assert run.end().code == -signal.SIGKILL
    run.assert_none_left("killed")


@counts(slow(1), len(HANGS))
def test_a_rank_that_hangs_or_skips_a_collective_is_named_within_its_limit(count, tmp_path):
    limit = f"parallel.timeout_s={TIME_LIMIT_S}"
    for run, ended, about, (kind, rank, where) in struck(HANGS, count, tmp_path, limit):
        words, end = (f"rank {rank}", where), ended
        if kind == "skip":  # a thread of gloo may end of it, with two lines of C++
            words, gloo = ("rank", "step"), ("terminate called", "  what()")
            ours = [line for line in ended.errors if not line.startswith(gloo)]
            end = replace(ended, errors=ours)
        # A sum of one rank alone is no step as planned, which is found first.
        is_found = where == "step 3 (normalizer" and kind == "skip"
        assert_ends_in_order(run, end, about, words, 2 if is_found else 7)
        took = ended.at - run.struck_at()
        assert took < TIME_LIMIT_S + 2 + SLACK_S, f"{about}: {took}"
        stacks = {path.stem: path.read_text() for path in (run.folder / "errors").glob("rank*.txt")}
        assert re.search(r'File ".*", line \d+', "".join(stacks.values())), about
        assert kind == "skip" or "rank_toys.py" in stacks[f"rank{rank}"], f"{about}: {stacks}"


PAUSED = ("model.dropout=0.1", "model.pause=0.1")
GREETINGS = (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 20)


def listeners(pids: Sequence[int]) -> set[tuple[str, int]]:
    """Find the addresses and ports that processes listen at."""
    targets = set()
    for pid in pids:
        with suppress(OSError):  # it ended
            targets |= {str(handle.readlink()) for handle in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            is_open = words[3] == "0A" or table.startswith("udp")
            if is_open and f"socket:[{words[9]}]" in targets:
                text, _, port = words[1].partition(":")
                family = socket.AF_INET if table[-1] != "6" else socket.AF_INET6
                raw = bytes.fromhex(text)
                whole = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add((socket.inet_ntop(family, whole), int(port, 16)))
    return found


def speak_to(run: RankRun) -> set[str]:
    """Be a stranger at every socket of a run until it ends; gives the addresses it listened at."""
    seen: set[tuple[str, int]] = set()
    with ExitStack() as strangers:
        while run.process.poll() is None:
            new = listeners(processes_in(run.place)) - seen
            for address, greeting in product(new, GREETINGS):
                with suppress(OSError):  # its process has ended since
                    stranger = socket.create_connection(address, timeout=5)
                    strangers.enter_context(stranger).sendall(greeting)
            seen |= new
            time.sleep(0.1)
    return {address for address, _ in seen}


@counts(slow(1), 6)
def test_a_run_that_loses_ranks_and_that_strangers_speak_to_ends_as_if_nothing_was(
    count, ranks, tmp_path
):
    lines = typed_over(TYPED, PAUSED)
    assert ranks.run(2, run_as_rank, lines, tmp_path / "undisturbed", {}) == [{"code": 0}] * 2
    undisturbed = lab.outcome(tmp_path / "undisturbed", rng=False)
    for case, chance in cases(count):
        phase = chance.choice(PHASES)
        step, rank = STEPS.get(phase, chance.randint(1, 7)), chance.randint(0, 1)
        strikes = [f"{KINDS[case % 3]}@{phase}:{step}@{rank}"]
        if case % 2:
            strikes.append(f"SIGKILL@reduce:{chance.randint(5, 7)}@{chance.randint(0, 1)}")
        run = RankRun(
            tmp_path / f"run{case}", *PAUSED, "parallel.max_restarts=3", STRIKES=" ".join(strikes)
        )
        about = f"{replay(case)}: {strikes}"
        assert {"127.0.0.1"} <= speak_to(run) <= {"127.0.0.1", "::1"}, about
        ended = run.end()
        assert ended.code == 0, f"{about}: {ended}"
        happened = len(list((run.place / "marks").iterdir()))
        assert len(ended.errors) == happened >= 1, f"{about}: {ended}"
        if happened == 1:
            assert f"rank {rank}" in ended.errors[0], about
            assert CAUSES[KINDS[case % 3]] in ended.errors[0], about
        lab.assert_same(lab.outcome(run.folder, rng=False), undisturbed, about)
        run.assert_none_left(about)


@pytest.mark.slow
def test_one_rank_alone_is_started_again_too(tmp_path):
    alone = ("parallel.ranks=1", "parallel.max_restarts=1")
    run = RankRun(tmp_path / "run", *alone, STRIKES="SIGKILL@update:6@0")
    ended = run.end()
    assert ended.code == 0, ended
    (error,) = ended.errors
    assert "rank 0 was killed by SIGKILL" in error
    assert error.endswith("starting again after step 4 (1 of 1 restarts)")
    assert [entry["step"] for entry in steps(run.folder)] == [*range(1, 8)]
    run.assert_none_left("one rank")
