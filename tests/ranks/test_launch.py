"""Runs over several ranks as a user starts them: one command, one folder, one line for an end."""

import signal
import socket
from pathlib import Path

import pytest

from tests.lib.nightly import nightly
from tests.lib.processes import Command, free_port, typed_over
from tests.lib.run_support import entries, read_json, steps
from trainer.cli.main import run

TYPED = (
    *("batch.global=16", "accum=fixed", "accum.micro=4", "objective=classify", "eval.every=null"),
    *("model._target_=tests.lib.faulty.Net", "data._target_=tests.lib.faulty.Rows"),
    *("wandb.mode=disabled", "log.samples=true", "device=cpu", "precision=fp32"),
)


def start(folder: Path, *typed: str, launcher: tuple[str, ...] = (), **more: str) -> Command:
    """Start a new run in `folder`."""
    words = typed_over((*TYPED, f"hydra.run.dir={folder}"), typed)
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run on one rank."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert run([*TYPED, "steps=6", f"hydra.run.dir={folder}"]) == 0
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    """The same samples behind every step, and losses that differ by rounding alone."""
    assert entries(folder, "samples.jsonl") == entries(other, "samples.jsonl")
    mine, theirs = steps(folder), steps(other)
    assert [entry["step"] for entry in mine] == [entry["step"] for entry in theirs]
    for key in ("loss", "grad_norm", "lr"):
        assert [e[key] for e in mine] == pytest.approx([e[key] for e in theirs], rel=1e-4)
    losses = [read_json(each / "result.json")["eval_loss"] for each in (folder, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_signal_saves_at_a_step_boundary_and_another_number_of_ranks_goes_on(tmp_path, alone):
    folder = tmp_path / "run"
    running = start(folder, "parallel.ranks=2", "parallel=ddp", "steps=6", "model.pause=0.1")
    running.wait_for("run/metrics.jsonl", 2)
    running.process.send_signal(signal.SIGINT)
    code, errors = finish(running)
    assert code == 75
    assert len(errors) == 3, "how it ended, its page, how to go on"
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert status["step"] == len(steps(folder)) < 6
    plan = read_json(folder / "plan.json")
    assert (plan["world_size"], plan["parallel"]) == (2, "ddp")
    typed = ("parallel.ranks=1", "parallel=auto")
    assert run([f"resume={folder}", "trust=[tests]", *typed]) == 0
    assert_same_run(folder, alone)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.nightly
def test_ranks_that_two_torchrun_agents_start_make_one_run_that_takes_the_same_steps(
    tmp_path, alone
):
    """As on two machines with one rank each, which share a file system."""
    folder = tmp_path / "run"
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    agent += ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    agent += ("--rdzv-id=job", "--local-addr=127.0.0.1")
    running = [start(folder, "steps=6", launcher=agent, LOUD="1") for _ in range(2)]
    assert [finish(each)[0] for each in running] == [0, 0]
    assert_same_run(folder, alone)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in (folder / "ranks").iterdir()] == ["rank1.log"]
    filed = (folder / "ranks" / "rank1.log").read_text().splitlines()
    assert set(filed) == {"rank 1 is built"}
    assert read_json(folder / "plan.json")["world_size"] == 2


HERE = socket.gethostname()
TORN = ", step 2 (compute, micro-batch 2): rows.txt: record 7 is torn"
KILLED = " was killed by SIGKILL, as the system often does when memory runs out, at step 2 ("
HANGS = " did not answer for 3 s (parallel.timeout_s), at step 2 (compute, micro-batch 2); "


@pytest.mark.parametrize(
    ("fault", "rank", "code", "line"),
    [
        nightly("data", 1, 3, TORN),
        nightly("SIGKILL", 1, 7, KILLED),
        nightly("hang", 0, 7, HANGS),
    ],
)
def test_of_ranks_that_joined_each_says_in_a_line_how_it_ended(
    tmp_path, alone, fault, rank, code, line
):
    folder = tmp_path / "run"
    typed = ("steps=6", f"model.fault={fault}", f"model.rank={rank}", "parallel.timeout_s=3")
    ended = [finish(each) for each in start_joined(folder, *typed)]
    assert ended[rank][0] == code
    error, *_ = ended[rank][1]
    assert error.startswith(f"train: error: rank {rank} on {HERE}{line}")
    if fault == "hang":
        assert "in happen" in (folder / "errors" / f"rank{rank}.txt").read_text()
    assert ended[1 - rank][0] == 7
    # The first rank of the run says how to go on, too.
    assert [len(errors) for _, errors in ended] == [4, 1]
    assert ended[0][1][1] == "train: ended after step 1; nothing is saved"
    assert ended[0][1][3].startswith("train: begin again with: train resume=")
    status = read_json(folder / "status.json")
    assert (status["exit_code"], status["state"]) == (ended[0][0], "failed")
    assert ended[0][1][0].endswith(status["reason"])
    (taken,), first = steps(folder), steps(alone)[0]
    assert [taken["step"], taken["loss"]] == [1, pytest.approx(first["loss"], rel=1e-4)]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("objective=next_token", "objective: labels of shape (2,)"),
        ("parallel.max_restarts=2", "parallel.max_restarts=2: the launcher restarts its"),
    ],
)
def test_a_config_error_that_joined_ranks_raise_together_leaves_no_folder(tmp_path, typed, says):
    first, second = start_joined(tmp_path / "run", typed)
    code, (error,) = finish(first)
    assert (code, finish(second)) == (2, (2, []))
    assert error.startswith(f"train: error: {says}")
    assert not [*tmp_path.iterdir()]


def test_a_joined_rank_says_what_it_alone_found_before_the_ranks_met(tmp_path):
    joined = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    joined["CUDA_VISIBLE_DEVICES"] = ""
    lone = start(tmp_path / "run", "device=cuda", **joined, MASTER_PORT=str(free_port()))
    code, (error,) = finish(lone)
    assert code == 2
    says = f"rank 1 on {HERE}, the start: device=cuda: no GPU is usable here"
    assert error.startswith(f"train: error: {says}")
