"""Runs over several ranks as a user starts them: one command, one folder, one line for an end.

What becomes of a local run whose ranks die, hang or are started again is in
`tests/reliability/test_rank_loss.py`; here are ranks that a launcher starts.
"""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.lib.nightly import nightly
from tests.lib.processes import Command, typed_over
from tests.reliability import lab
from trainer.cli.main import run
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.launch.rank import _agree

TYPED = (
    *("batch.global=16", "accum=fixed", "accum.micro=4", "objective=classify", "eval.every=null"),
    *("model._target_=tests.lib.faulty.Net", "data._target_=tests.lib.faulty.Rows"),
    *("wandb.mode=disabled", "log.samples=true", "device=cpu"),
)


def start(folder: Path, *typed: str, launcher: tuple[str, ...] = (), **more: str) -> Command:
    """Start a command; one that neither resumes nor sweeps is a new run in `folder`."""
    words = typed_over((*TYPED, f"hydra.run.dir={folder}"), typed)
    if {"resume", "run"} & {word.partition("=")[0] for word in typed}:
        words = [*typed, "trust=[tests]"]
    elif "-m" in typed:
        words = typed_over(TYPED, typed)
    return Command.start(folder.parent, words, launcher, **more)


def start_joined(folder: Path, *typed: str) -> list[Command]:
    """Start two ranks as torchrun or a cluster's job would; `{rank}` is each one's own."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [
        start(folder, *(t.format(rank=rank) for t in typed), RANK=rank, LOCAL_RANK=rank, **shared)
        for rank in "01"
    ]


def finish(command: Command) -> tuple[int, list[str]]:
    """Exit code, and the lines on stderr."""
    ended = command.end()
    return ended.code, ended.errors


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in lines(folder / "metrics.jsonl") if "loss" in entry]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run on one rank."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert run([*TYPED, "steps=12", f"hydra.run.dir={folder}"]) == 0
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    """The same samples behind every step, and losses that differ by rounding alone."""
    assert lines(folder / "samples.jsonl") == lines(other / "samples.jsonl")
    mine, theirs = steps(folder), steps(other)
    assert [entry["step"] for entry in mine] == [entry["step"] for entry in theirs]
    for key in ("loss", "grad_norm", "lr"):
        assert [e[key] for e in mine] == pytest.approx([e[key] for e in theirs], rel=1e-4)
    losses = [read(each / "result.json")["eval_loss"] for each in (folder, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("number", "then"),
    [
        (signal.SIGINT, ("parallel.ranks=1", "parallel=auto")),
        nightly(signal.SIGTERM, ("parallel.ranks=3", "parallel=fsdp")),
    ],
)
def test_a_signal_saves_at_a_step_boundary_and_another_number_of_ranks_goes_on(
    tmp_path, alone, number, then
):
    folder = tmp_path / "run"
    running = start(folder, "parallel.ranks=2", "parallel=fsdp", "steps=12", "model.pause=0.1")
    running.wait_for("run/metrics.jsonl", 3)
    running.process.send_signal(number)
    code, errors = finish(running)
    assert code == 75
    assert len(errors) == 1
    status = read(folder / "status.json")
    assert status["state"] == "preempted"
    assert status["step"] == len(steps(folder)) < 12
    plan = read(folder / "plan.json")
    assert (plan["world_size"], plan["parallel"]) == (2, "fsdp")
    assert run([f"resume={folder}", "trust=[tests]", *then]) == 0
    assert_same_run(folder, alone)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_two_torchrun_agents_make_one_run_that_takes_the_same_steps(tmp_path, alone):
    """As on two machines with one rank each, which share a file system."""
    folder = tmp_path / "run"
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    agent += ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    agent += ("--rdzv-id=job", "--local-addr=127.0.0.1")
    running = [start(folder, "steps=12", launcher=agent, LOUD="1") for _ in range(2)]
    assert [finish(each)[0] for each in running] == [0, 0]
    assert_same_run(folder, alone)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in (folder / "ranks").iterdir()] == ["rank1.log"]
    filed = (folder / "ranks" / "rank1.log").read_text().splitlines()
    assert set(filed) == {"rank 1 is built"}
    assert read(folder / "plan.json")["world_size"] == 2


@pytest.mark.parametrize(
    ("fault", "codes", "line"),
    [
        ("data", (3, 3), "rank 1, step 2 (compute, micro-batch 2): rows.txt: record 7 is torn"),
        nightly(
            "SIGKILL",
            (7, 7),
            "rank 1 was killed by SIGKILL, as the system does when memory runs out, at step 2 (co",
        ),
    ],
)
def test_the_first_of_ranks_that_joined_names_the_one_that_failed(tmp_path, fault, codes, line):
    folder = tmp_path / "run"
    first, second = start_joined(folder, f"model.fault={fault}")
    code, errors = finish(first)
    assert (code, finish(second)) == (codes[0], (codes[1], []))
    assert len(errors) == 1
    assert errors[0].startswith(f"train: error: {line}")
    status = read(folder / "status.json")
    assert status["exit_code"] == code
    assert errors[0].endswith(status["reason"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not list(folder.glob(".tmp-*"))


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_joined_and_hangs_ends_all_with_one_line(tmp_path, rank):
    folder = tmp_path / "run"
    typed = ("model.fault=hang", f"model.rank={rank}", "parallel.timeout_s=3")
    first, second = start_joined(folder, *typed)
    code, errors = finish(first)
    assert (code, finish(second)[0]) == (7, 7)
    stacks = folder / "errors" / f"rank{rank}.txt"
    slot = 1 + rank  # the first rank has called the model once before, to check its sums
    assert errors == [
        f"train: error: rank {rank} did not answer for 3 s (parallel.timeout_s), at step 2 "
        f"(compute, micro-batch {slot}); what it was doing is in {stacks}"
    ]
    assert "in happen" in stacks.read_text()
    status = read(folder / "status.json")
    assert (status["exit_code"], status["state"]) == (7, "failed")
    assert not list(folder.glob(".tmp-*"))


def agreed(world: World, folder: Path) -> str:
    """What a rank says to a config whose seed is its own."""
    try:
        _agree(lab.config(f"seed={world.rank}"), folder, world)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_were_given_another_config_are_refused(ranks, tmp_path):
    line = "seed: rank 1 was given another value than rank 0; type the same command on every node"
    assert ranks.run(2, agreed, tmp_path) == [line, line]


@pytest.mark.nightly
def test_a_config_error_that_joined_ranks_raise_together_leaves_no_folder(tmp_path):
    first, second = start_joined(tmp_path / "run", "objective=next_token")
    code, (error,) = finish(first)
    assert (code, finish(second)) == (2, (2, []))
    assert error.startswith("train: error: objective=next_token: labels of shape (2,)")
    assert not [*tmp_path.iterdir()]


def test_one_rank_and_several_contradict_before_anything_starts(tmp_path, capsys):
    folder = tmp_path / "run"
    assert run([*TYPED, f"hydra.run.dir={folder}", "parallel=none", "parallel.ranks=2"]) == 2
    line = "train: error: parallel.ranks=2: parallel=none is one rank; use parallel=ddp\n"
    assert capsys.readouterr().err == line
    assert not folder.exists()


@pytest.mark.nightly
def test_deterministic_layout_keeps_its_bits_over_a_resume_on_another_number_of_ranks(tmp_path):
    weights = []
    for first, then in ((1, 1), (2, 3), (4, 1)):
        folder = tmp_path / f"run{first}{then}"
        layout = ("deterministic=layout", "model.pause=0.05", "steps=50")
        running = start(folder, *layout, f"parallel.ranks={first}")
        running.wait_for(f"{folder.name}/metrics.jsonl", 20)
        running.process.send_signal(signal.SIGTERM)
        assert finish(running)[0] == 75
        assert finish(start(folder, f"resume={folder}", f"parallel.ranks={then}")) == (0, [])
        saved = folder / "checkpoints" / "step-00000050"
        files = [saved / f"{name}.safetensors" for name in ("model", "optimizer")]
        losses = [entry["loss"] for entry in steps(folder)]
        weights.append(([path.read_bytes() for path in files], losses))
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_evaluating_on_several_ranks_is_evaluating_on_one(tmp_path, mode):
    folder = tmp_path / "run"
    double = ("model._target_=tests.lib.faulty.Double", "data.num_samples=200", "data.holdout=0.3")
    assert finish(start(folder, "steps=2", *double)) == (0, [])
    found = []
    for ranks, way in ((1, "auto"), (2, mode)):
        typed = (f"run={folder}", f"parallel.ranks={ranks}", f"parallel={way}")
        assert finish(start(folder, "evaluate", *typed)) == (0, [])
        found.append(read(folder / "evaluate.json"))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert read(folder / "status.json")["state"] == "completed"
    assert not (folder / "ranks").exists()
