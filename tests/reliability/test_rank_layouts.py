"""Harnesses 10, 15 and 27: what a run over several ranks learns, skips and listens to.

Ranks are real processes over gloo, started once; each case is a whole run with its folder.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from tests.lib.ranks_support import Ranks
from tests.reliability import lab
from tests.reliability.rank_runs import RankRun, processes_in
from tests.reliability.rank_work import run_as_rank
from tests.reliability.support import cases, replay
from trainer.checkpoint.store import CheckpointStore
from trainer.core.world import World

BLOCKS = "model._target_=tests.reliability.rank_toys.Net"
LONG = (BLOCKS, "+model.double=true", "steps=50", "checkpoint.every=null", "accum.micro=2")
EXACT = 1e-12


def run_on(size: int, folder: Path, lines: Sequence[str], **how: Any) -> list[dict[str, Any]]:
    """Run a config on some ranks; gives each rank's end.

    The ranks are new: DTensor remembers process groups by their shape and not by their life.
    """
    ranks = Ranks()
    try:
        return ranks.run(size, run_as_rank, tuple(lines), folder, how)
    finally:
        ranks.close()


def weights(folder: Path) -> dict[str, Any]:
    loaded = CheckpointStore(folder / "checkpoints").load(set_aside=False)
    return {n: t[...] for n, t in loaded.tensors.items() if not n.startswith("rng.")}


def assert_close(found: Path, expected: Path, about: str) -> None:
    """The same samples and tokens behind every step, and state that differs by rounding alone."""
    mine, theirs = lab.logged(found), lab.logged(expected)
    assert mine["ledger"] == theirs["ledger"], about
    for key in ("step", "tokens", "samples", "epoch", "lr"):
        assert [e.get(key) for e in mine["metrics"]] == [e.get(key) for e in theirs["metrics"]], (
            about
        )
    for key in ("loss", "grad_norm", "eval_loss"):
        values = [[e[key] for e in log["metrics"] if key in e] for log in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-10), f"{about}: {key}"
    saved, reference = weights(found), weights(expected)
    assert saved.keys() == reference.keys(), about
    for name, tensor in reference.items():
        if not name.endswith("calls"):
            error = (saved[name].double() - tensor.double()).norm() / (
                tensor.double().norm() + 1e-30
            )
            assert float(error) <= EXACT, f"{about}: {name} differs by {float(error):.1e}"


PATHS = (
    ((1, "auto"), (2, "ddp"), (1, "auto")),
    ((2, "ddp"), (4, "fsdp"), (2, "ddp")),
    ((2, "ddp"), (2, "fsdp"), (1, "none")),
    ((4, "hsdp"), (1, "none"), (2, "fsdp")),
)


def change_layouts(paths: Sequence[Any], tmp_path: Path) -> None:
    expected = tmp_path / "alone"
    assert run_on(1, expected, LONG) == [{"code": 0}]
    for path in paths:
        folder = tmp_path / "-".join(f"{size}{mode}" for size, mode in path)
        for part, (size, mode) in enumerate(path):
            stop = (17, 34, None)[part]
            how = {"resume": part > 0, "stop_after": stop}
            lines = (*LONG, f"parallel={mode}")
            ended = run_on(size, folder, lines, **how)
            assert {each["code"] for each in ended} == {0 if stop is None else 75}, (path, ended)
        assert_close(folder, expected, str(path))


@pytest.mark.nightly
def test_layouts_may_change_between_steps_and_no_step_does(tmp_path: Path) -> None:
    change_layouts(PATHS[:2], tmp_path)


@pytest.mark.nightly
def test_every_change_of_layout(tmp_path: Path) -> None:
    change_layouts(PATHS, tmp_path)


TORCH = "optimizer._target_=torch.optim"
# Without Rprop, which PyTorch does not step in shards.
OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "sgd": ("optimizer=sgd", "optimizer.lr=0.05"),
    "sgd without momentum": ("optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0"),
    "AMSGrad": (f"{TORCH}.Adam", "optimizer.lr=0.01", "optimizer.amsgrad=true"),
    "centered RMSprop": (f"{TORCH}.RMSprop", "optimizer.momentum=0.9", "optimizer.centered=true"),
    **{
        name: (f"{TORCH}.{name}", "optimizer.lr=0.01")
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam")
    },
}
MODES = ("none", "ddp", "fsdp", "hsdp")
SIX = (BLOCKS, "+model.double=true", "steps=6", "checkpoint.every=null", "accum.micro=2")


def resume_over(ranks: Ranks, name: str, pairs: Sequence[tuple[str, str]], place: Path) -> None:
    """Stop a run after three steps under one mode, and end it under another, on two ranks."""

    def end(folder: Path, mode: str, code: int, **how: Any) -> None:
        given = (*SIX, *OPTIMIZERS[name], f"parallel={mode}"), folder, how
        is_alone = mode == "none"
        ended = [run_as_rank(World(), *given)] if is_alone else ranks.run(2, run_as_rank, *given)
        assert {each["code"] for each in ended} == {code}, (name, folder.name, ended)

    end(place / "undisturbed", "none", 0)
    for first, group in groupby(sorted(pairs), lambda pair: pair[0]):
        end(place / first, first, 75, stop_after=3)
        for _, then in group:
            folder = place / f"{first}-{then}"
            shutil.copytree(place / first, folder)
            end(folder, then, 0, resume=True)
            assert_close(folder, place / "undisturbed", f"{name}: {first}, then {then}")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()


def test_an_optimizer_goes_on_under_another_mode(ranks: Ranks, tmp_path: Path) -> None:
    resume_over(ranks, "sgd", [("none", "fsdp"), ("ddp", "fsdp"), ("fsdp", "none")], tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_over_every_pair_of_modes(
    name: str, ranks: Ranks, tmp_path: Path
) -> None:
    resume_over(ranks, name, [*product(MODES, repeat=2)], tmp_path)


@pytest.mark.parametrize(
    ("size", "line", "says"),
    [
        (2, "parallel=none", "use parallel=ddp"),
        (2, "parallel=hsdp parallel.shard=3", "parallel.shard=3"),
        (3, "parallel=hsdp parallel.replicate=2", "parallel.replicate=2"),
        (2, "accum.micro=4 accum.steps=3 batch.global=8", "accum.steps"),
    ],
)
def test_a_split_that_cannot_be_stops_every_rank(
    size: int, line: str, says: str, tmp_path: Path
) -> None:
    typed = line.split()
    keys = {each.partition("=")[0] for each in typed}
    lines = [each for each in LONG if each.partition("=")[0] not in keys]
    for each in run_on(size, tmp_path, (*lines, *typed)):
        assert each["code"] == 2, each
        assert says in each["error"]
        assert "\n" not in each["error"]


KINDS = [f"{where}:{value}" for where in ("loss", "gradient") for value in ("nan", "inf", "-inf")]
SHORT = (BLOCKS, "steps=3", "checkpoint.every=1", "checkpoint.keep=9", "eval.every=null")


def poison(count: int, tmp_path: Path) -> None:
    """Strike one sample of step 2: of every rank, in every micro-batch, in every way."""
    strikes = 0
    modes = ("ddp", "fsdp")
    plans = {mode: run_on(2, tmp_path / mode, (*SHORT, f"parallel={mode}")) for mode in modes}
    ids = {mode: ended[0]["code"] for mode, ended in plans.items()}
    assert ids == {"ddp": 0, "fsdp": 0}
    step = lab.logged(tmp_path / "ddp")["ledger"][1]["ids"]
    for case, chance in cases(count):
        mode, kind = modes[case % 2], KINDS[case // 2 % len(KINDS)]
        # Over all cases each sample is struck: every micro-batch of either rank.
        struck = step[case // (2 * len(KINDS)) % len(step)] if count > 12 else chance.choice(step)
        folder, about = tmp_path / f"run{case}", f"{replay(case)}: {mode} {kind} {struck}"
        lines = (*SHORT, f"parallel={mode}", "accum.micro=2", f"data.faults=['{struck}:{kind}']")
        ended = run_on(2, folder, lines, digests=True)
        assert [each["code"] for each in ended] == [0, 0], f"{about}: {ended}"
        for each in ended:
            before, after, later = (each["digests"][step] for step in (1, 2, 3))
            assert before == after, about
            assert after != later, about
        entries = [e for e in lab.logged(folder)["metrics"] if "lr" in e]
        assert [e.get("skipped") for e in entries] == [None, "not finite", None], about
        saved = [CheckpointStore(folder / "checkpoints").load(step) for step in (1, 2, 3)]
        names = [n for n in saved[0].tensors if not n.startswith("rng.")]
        same = [lab.bits(saved[0].read(n)) == lab.bits(saved[1].read(n)) for n in names]
        assert all(same), about
        sums = [float(saved[2].read(n).double().sum()) for n in names]
        assert all(map(math.isfinite, sums)), about
        strikes += 1
    print(f"{strikes} values that are not finite: every rank skipped, nothing changed")


@pytest.mark.nightly
def test_a_value_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    poison(6, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_sample_of_a_step_in_every_way(tmp_path: Path) -> None:
    poison(2 * len(KINDS) * 8, tmp_path)


def listeners(pids: Sequence[int]) -> dict[tuple[str, int], str]:
    """What processes listen at, address and port, with the name of the table."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(handle.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            is_open = words[3] == "0A" or table.startswith("udp")
            if is_open and words[9] in inodes:
                text, _, port = words[1].partition(":")
                family = socket.AF_INET if table[-1] != "6" else socket.AF_INET6
                raw = bytes.fromhex(text)
                whole = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found[socket.inet_ntop(family, whole), int(port, 16)] = table
    return found


def test_a_run_listens_on_the_loopback_alone_and_to_no_stranger(tmp_path: Path) -> None:
    undisturbed = RankRun.start(tmp_path / "undisturbed", "steps=20", "model.pause=0.02")
    assert undisturbed.end().code == 0
    run = RankRun.start(tmp_path / "run", "steps=20", "model.pause=0.02")
    run.wait_for("run/metrics.jsonl")
    seen: dict[tuple[str, int], str] = {}
    strangers = []
    while run.process.poll() is None and len(lab.logged(run.folder)["metrics"]) < 12:
        found = listeners(processes_in(run.place) or [run.process.pid])
        for address, port in found.keys() - seen.keys():
            for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 20):
                stranger = socket.create_connection((address, port), timeout=5)
                stranger.sendall(greeting)
                strangers.append(stranger)
        seen |= found
    ended = run.end()
    for stranger in strangers:
        stranger.close()
    assert ended.code == 0, ended
    assert ended.errors == []
    assert seen
    assert {address for address, _ in seen} <= {"127.0.0.1", "::1"}, seen
    theirs, mine = (lab.outcome(r.folder, rng=False) for r in (run, undisturbed))
    lab.assert_same(theirs, mine, json.dumps([*map(str, seen)]))
    print(f"{len(seen)} sockets, all on the loopback; {len(strangers)} strangers changed nothing")
