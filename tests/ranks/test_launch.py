"""Runs over several ranks as a user starts them: one command, one folder, one line for an end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TYPED = (
    "batch.global=16",
    "accum=fixed",
    "accum.micro=4",
    "model._target_=faulty.Net",
    "data._target_=faulty.Rows",
    "objective=classify",
    "wandb.mode=disabled",
    "eval.every=null",
    "log.samples=true",
)


@dataclass
class Started:
    """A running command."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, step: int) -> None:
        """Wait until a step is in metrics.jsonl."""
        for _ in range(3000):
            if len(steps(self.folder)) >= step:
                return
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.05)
        raise AssertionError("no step")

    def end(self, timeout_s: float = 200) -> tuple[int, list[str]]:
        """Exit code, and the lines on stderr."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, [line for line in errors.splitlines() if line.strip()]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "lib")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(folder: Path, *typed: str, **more: str) -> Started:
    """Start a command; one that neither resumes nor sweeps is a new run in `folder`."""
    keys = {line.partition("=")[0] for line in typed}
    words = [line for line in TYPED if line.partition("=")[0] not in keys]
    if any(t.startswith(("resume=", "run=")) for t in typed):
        words = []
    elif "-m" not in typed:
        words.append(f"hydra.run.dir={folder}")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *typed, *words],
        cwd=folder.parent,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Started(process, folder)


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in lines(folder / "metrics.jsonl") if "loss" in entry]


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def members(folder: Path) -> list[int]:
    """Processes that are ranks of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                here = (entry / "cwd").readlink() == folder.parent
            except OSError:
                continue
            if b"trainer.launch.rank" in words and here:
                found.append(int(entry.name))
    return found


def assert_none_left(folder: Path) -> None:
    for _ in range(100):
        if not members(folder):
            return
        time.sleep(0.1)
    raise AssertionError(f"left: {members(folder)}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run on one rank."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert start(folder, "steps=12").end() == (0, [])
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    """The same samples behind every step, and losses that differ by rounding alone."""
    assert lines(folder / "samples.jsonl") == lines(other / "samples.jsonl")
    mine, theirs = steps(folder), steps(other)
    assert [entry["step"] for entry in mine] == [entry["step"] for entry in theirs]
    for key in ("loss", "grad_norm", "lr"):
        assert [e[key] for e in mine] == pytest.approx([e[key] for e in theirs], rel=1e-4)
    results = [json.loads((f / "result.json").read_text()) for f in (folder, other)]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-4)


def test_one_command_on_several_ranks_makes_one_folder_and_takes_the_same_steps(tmp_path, alone):
    folder = tmp_path / "run"
    running = start(folder, "steps=12", "parallel.ranks=3", "parallel=fsdp")
    assert running.end() == (0, [])
    assert_same_run(folder, alone)
    assert status(folder)["state"] == "completed"
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["world_size"], plan["parallel"]) == (3, "fsdp")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not (folder / "ranks").exists()
    assert not (folder / "errors").exists()


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        pytest.param(
            "raise",
            7,
            "rank 1 failed at step 3 (compute, micro-batch 1): ValueError: injected",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "data",
            3,
            "rank 1, step 3 (compute, micro-batch 1): rows.txt: record 7 is torn",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "exit",
            7,
            "rank 1 ended with exit code 3 and without a word, at step 3 (compute",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "SIGKILL",
            7,
            "rank 1 was killed by SIGKILL, as the system does when memory runs out",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_rank_that_ends_badly_ends_the_run_with_one_line(tmp_path, fault, code, says):
    folder = tmp_path / "run"
    typed = (f"model.fault={fault}", "model.at=5", "parallel.ranks=2", "steps=100")
    running = start(folder, *typed, "model.pause=0.1")
    running.wait_for(2)
    began = time.monotonic()
    found, errors = running.end()
    assert time.monotonic() - began < 10
    assert found == code
    assert len(errors) == 1
    assert errors[0].startswith(f"train: error: {says}")
    assert status(folder)["exit_code"] == code
    assert status(folder)["step"] == 2
    assert_none_left(folder)


@pytest.mark.nightly
def test_a_rank_that_hangs_is_named_with_its_place_and_leaves_its_stack(tmp_path):
    folder = tmp_path / "run"
    running = start(folder, "model.fault=hang", "parallel.ranks=2", "parallel.timeout_s=2")
    running.wait_for(1)
    began = time.monotonic()
    code, errors = running.end()
    assert time.monotonic() - began < 12
    assert code == 7
    assert len(errors) == 1
    assert "rank 1 did not answer for 2 s (parallel.timeout_s), at step 2 (compute" in errors[0]
    assert "in happen" in (folder / "errors" / "rank1.txt").read_text()
    assert_none_left(folder)


@pytest.mark.nightly
def test_ranks_listen_on_the_loopback_only_and_do_not_outlive_their_launcher(tmp_path):
    folder = tmp_path / "run"
    running = start(folder, "parallel.ranks=2", "steps=1000", "model.pause=0.05")
    running.wait_for(1)
    assert len(members(folder)) == 2
    listening = [
        address for pid in (*members(folder), running.process.pid) for address in listeners(pid)
    ]
    running.process.kill()
    running.process.communicate()
    assert listening
    assert {address for address in listening if address != "127.0.0.1"} == set()
    assert_none_left(folder)


def listeners(pid: int) -> list[str]:
    """Addresses that a process listens on."""
    inodes = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        target = str(handle.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in inodes:
                address = bytes.fromhex(words[1].partition(":")[0])[::-1]
                family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                found.append(socket.inet_ntop(family, address))
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_signal_saves_at_a_step_boundary_and_another_number_of_ranks_goes_on(
    tmp_path, alone, number
):
    folder = tmp_path / "run"
    running = start(folder, "parallel.ranks=2", "steps=12", "model.pause=0.1")
    running.wait_for(3)
    running.process.send_signal(number)
    code, errors = running.end()
    assert code == 75
    assert len(errors) == 1
    stopped = status(folder)
    assert stopped["state"] == "preempted"
    assert stopped["step"] == len(steps(folder)) < 12
    ranks, mode = (1, "auto") if number == signal.SIGINT else (3, "fsdp")
    typed = (f"resume={folder}", "trust=[faulty]", f"parallel.ranks={ranks}", f"parallel={mode}")
    resumed = start(folder, *typed)
    assert resumed.end() == (0, [])
    assert_same_run(folder, alone)
    assert_none_left(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("saved", [True, False])
def test_a_lost_rank_is_restarted_and_the_run_ends_where_an_undisturbed_one_does(
    tmp_path, alone, saved
):
    folder = tmp_path / "run"
    running = start(
        folder,
        "steps=12",
        "parallel.ranks=2",
        "parallel.max_restarts=1",
        f"checkpoint.every={5 if saved else 'null'}",
        "model.fault=SIGKILL",
        "model.at=15",
        f"model.once={tmp_path / 'once'}",
    )
    code, errors = running.end()
    assert code == 0
    assert len(errors) == 1
    assert f"starting again after step {5 if saved else 0} (1 of 1 restarts)" in errors[0]
    assert_same_run(folder, alone)


def test_two_torchrun_agents_make_one_run_that_takes_the_same_steps(tmp_path, alone):
    """As on two machines with one rank each, which share a file system."""
    folder = tmp_path / "run"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    agent += ["--rdzv-id=job", "--local-addr=127.0.0.1"]
    line = [*agent, "-m", "trainer", *TYPED, "steps=12", f"hydra.run.dir={folder}"]
    running = [
        subprocess.Popen(
            line, cwd=tmp_path, env=environment(LOUD="1"), stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    errors = [each.communicate(timeout=200)[1] for each in running]
    assert [each.returncode for each in running] == [0, 0], errors
    assert_same_run(folder, alone)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in (folder / "ranks").iterdir()] == ["rank1.log"]
    filed = (folder / "ranks" / "rank1.log").read_text().splitlines()
    assert set(filed) == {"rank 1 is built"}
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["world_size"] == 2


def start_joined(folder: Path, *typed: str) -> list[Started]:
    """Start two ranks as torchrun or a cluster's job would."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [start(folder, *typed, RANK=rank, LOCAL_RANK=rank, **shared) for rank in "01"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("data", 3, "rank 1, step 2 (compute, micro-batch 2): rows.txt: record 7 is torn"),
        pytest.param(
            "SIGKILL",
            7,
            "rank 1 was killed by SIGKILL, as the system does when memory runs out, at step 2 (co",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_first_of_ranks_that_joined_names_the_one_that_failed(tmp_path, fault, code, says):
    folder = tmp_path / "run"
    first, second = start_joined(folder, f"model.fault={fault}")
    ended, errors = first.end()
    assert (ended, second.end()) == (code, (code, []))
    assert len(errors) == 1
    assert errors[0].startswith(f"train: error: {says}")
    assert status(folder)["exit_code"] == code
    assert errors[0].endswith(status(folder)["reason"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not list(folder.glob(".tmp-*"))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_rank_that_joined_and_hangs_ends_all_with_one_line(tmp_path, rank):
    folder = tmp_path / "run"
    typed = ("model.fault=hang", f"model.rank={rank}", "parallel.timeout_s=3")
    first, second = start_joined(folder, *typed)
    code, errors = first.end()
    assert (code, second.end()[0]) == (7, 7)
    stacks = folder / "errors" / f"rank{rank}.txt"
    assert errors == [
        f"train: error: rank {rank} did not answer for 3 s (parallel.timeout_s), at step 2 "
        f"(compute, micro-batch 2); what it was doing is in {stacks}"
    ]
    assert "in happen" in stacks.read_text()
    assert (status(folder)["exit_code"], status(folder)["state"]) == (7, "failed")
    assert not list(folder.glob(".tmp-*"))


def test_ranks_that_were_given_another_config_are_refused_with_one_line(tmp_path):
    folder = tmp_path / "run"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ended = [
        start(folder, f"seed={rank}", RANK=rank, LOCAL_RANK=rank, **shared).process for rank in "01"
    ]
    errors = [each.communicate(timeout=200)[1] for each in ended]
    assert [each.returncode for each in ended] == [2, 2]
    line = "train: error: seed: rank 1 was given another value than rank 0; type the same command"
    assert errors[0].startswith(line)
    assert errors[1] == ""


def test_one_rank_and_several_contradict_before_anything_starts(tmp_path):
    code, errors = start(tmp_path / "run", "parallel=none", "parallel.ranks=2").end()
    assert code == 2
    assert errors == ["train: error: parallel.ranks=2: parallel=none is one rank; use parallel=ddp"]
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_deterministic_layout_keeps_its_bits_over_a_resume_on_another_number_of_ranks(tmp_path):
    weights = []
    for first, then in ((1, 1), (2, 3), (4, 1)):
        folder = tmp_path / f"run{first}{then}"
        layout = ("deterministic=layout", "model.pause=0.05", "steps=50")
        running = start(folder, *layout, f"parallel.ranks={first}")
        running.wait_for(20)
        running.process.send_signal(signal.SIGTERM)
        assert running.end()[0] == 75
        resumed = start(folder, f"resume={folder}", "trust=[faulty]", f"parallel.ranks={then}")
        assert resumed.end() == (0, [])
        files = ("model.safetensors", "optimizer.safetensors")
        saved = folder / "checkpoints" / "step-00000050"
        losses = [entry["loss"] for entry in steps(folder)]
        weights.append(([(saved / name).read_bytes() for name in files], losses))
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.nightly
def test_every_job_of_a_sweep_has_its_own_ranks(tmp_path):
    running = start(
        tmp_path / "unused",
        "-m",
        "parallel.ranks=2",
        "steps=2",
        "accum.micro=2,8",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )
    assert running.end(120) == (0, [])
    for number in range(2):
        assert status(tmp_path / "sweep" / str(number))["state"] == "completed"


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.nightly
def test_evaluating_on_several_ranks_is_evaluating_on_one(tmp_path, mode):
    folder = tmp_path / "run"
    double = ("model._target_=faulty.Double", "data.num_samples=200", "data.holdout=0.3")
    assert start(folder, "steps=2", *double).end() == (0, [])
    found = []
    for ranks in (1, 2):
        typed = ("evaluate", f"run={folder}", "trust=[faulty]", f"parallel.ranks={ranks}")
        typed += (f"parallel={'auto' if ranks == 1 else mode}",)
        assert start(folder, *typed).end() == (0, [])
        found.append(json.loads((folder / "evaluate.json").read_text()))
    assert found[0].keys() == found[1].keys()
    assert list(found[1].values()) == pytest.approx(list(found[0].values()), rel=1e-12)
    assert status(folder)["state"] == "completed"
    assert not (folder / "ranks").exists()


@pytest.mark.parametrize(
    ("mode", "rank"), [("ddp", 0), pytest.param("fsdp", 1, marks=pytest.mark.nightly)]
)
def test_several_ranks_hear_within_a_step_of_a_write_behind_them_that_failed(tmp_path, mode, rank):
    folder = tmp_path / "run"
    running = start(
        folder,
        *("parallel.ranks=2", "steps=40", "model.pause=0.2"),
        *("checkpoint.every=3", "checkpoint.asynchronous=true", "model.fault=unwritable"),
        *(f"model.rank={rank}", "model.at=3", f"parallel={mode}"),
    )
    code, errors = running.end()
    assert code == 8
    assert len(errors) == 1
    # Written behind step 4 at the earliest, heard of at its end; a step takes far longer.
    assert 3 <= status(folder)["step"] <= 5


def test_a_sweep_under_torchrun_is_refused_with_one_line(tmp_path):
    code, errors = start(tmp_path / "run", "-m", "seed=0,1", RANK="0", LOCAL_RANK="0").end()
    assert code == 2
    assert errors == ["train: error: -m: a sweep starts its own ranks; run it without torchrun"]
