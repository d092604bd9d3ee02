"""Run the very files of docs/how-to/slurm.md and slurm-torchrun.md, by a stand-in for Slurm."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.lib.cli_support import CHECKOUT
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import TOYS, curve, go, overrides, read_json, state
from tests.lib.slurm import documented_files, install

LINE = f"steps=40 hooks=[{TOYS}.Slow]"
PREEMPTED_AT = 5  # steps
LIMIT_S = 250

FILES = documented_files()


def ended(command: list[str], folder: Path, preempted_at: int | None = None) -> str:
    """Queue a job, preempt it if asked to, and wait; gives what its script printed."""
    environment = install(folder, CHECKOUT)
    if preempted_at is not None:
        (folder / "preempt").write_text(str(preempted_at))
    subprocess.run(["sbatch", *command], env=environment, check=True, capture_output=True)
    until = time.monotonic() + LIMIT_S
    while not (folder / "job-1" / "done").exists():
        assert time.monotonic() < until, (folder / "job-1" / "log").read_text()
        time.sleep(0.1)
    assert not (folder / "preempt").exists(), "it was preempted"
    return (folder / "job-1" / "log").read_text()


@pytest.mark.parametrize(
    ("name", "ranks"), [slow("nodes.sh", 2), nightly("one-node.sh", 1), nightly("torchrun.sh", 2)]
)
def test_a_job_that_is_preempted_and_requeued_has_the_bits_of_an_unbroken_one(
    name, ranks, tmp_path, monkeypatch
):
    monkeypatch.setenv("RANKS", "1")  # of each node, under torchrun
    text = FILES[name].replace("--ntasks-per-node=8", "--ntasks-per-node=1")
    Path("job.sh").write_text(text)
    printed = ended(["job.sh", "name=gpt", *overrides(LINE)], tmp_path / "slurm", PREEMPTED_AT)
    (run,) = Path().glob("outputs/*/*-gpt")
    first, last = re.findall(r"job 1: exit code (\d+)", printed)
    assert (first, last) == ("75", "0"), "of the run, which the script put back"
    assert "40 steps" in printed
    status = read_json(run / "status.json")
    assert (status["state"], status["step"]) == ("completed", 40)
    assert (run / ".hydra" / "resumed").is_dir(), "in the same folder"
    whole = go(f"{LINE} parallel.ranks={ranks} parallel={'ddp' if ranks > 1 else 'none'}")
    assert curve(run, "loss") == curve(whole, "loss")
    expected = state(whole)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in state(run).items())


@pytest.mark.parametrize("name", FILES)
def test_a_job_is_put_back_where_a_signal_ended_it_and_not_where_it_failed(name, tmp_path):
    """Codes are of a run that saved, or got SIGUSR1 or SIGTERM before it had a folder."""
    for command, line in {"srun": "exit $CODE", "scontrol": 'echo "$1" >> put-back'}.items():
        (tmp_path / command).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / command).chmod(0o755)
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0"}
    for code in (0, 1, 2, 7, 75, 137, 138, 143):
        shell = ["bash", "-c", FILES[name]]
        ended = subprocess.run(shell, env={**own, "CODE": str(code)}, cwd=tmp_path, check=False)
        listed = (tmp_path / "put-back").read_text().split() if code else []
        (tmp_path / "put-back").write_text("")
        assert ("requeue" in listed) == (code in (75, 138, 143)), code
        assert ended.returncode == code


@pytest.mark.nightly
def test_every_job_of_an_array_ends_in_a_folder_of_its_own(tmp_path):
    Path("job.sh").write_text(FILES["array.sh"])
    typed = [each for each in overrides(LINE) if not each.startswith("optimizer.lr")]
    ended(["job.sh", *typed], tmp_path / "slurm", PREEMPTED_AT)
    runs = sorted(Path().glob("outputs/*/*-rate-*"))
    assert [run.name.rpartition("rate-")[2] for run in runs] == ["1e-3", "3e-3", "1e-2"]
    assert [read_json(run / "status.json")["state"] for run in runs] == ["completed"] * 3
    assert [(run / ".hydra" / "resumed").is_dir() for run in runs] == [True, False, False]


@pytest.mark.nightly
def test_submitit_puts_a_job_that_is_preempted_back_into_the_queue(tmp_path):
    environment = install(tmp_path / "slurm", CHECKOUT)
    (tmp_path / "slurm" / "preempt").write_text(str(PREEMPTED_AT))
    typed = ["hydra/launcher=submitit_slurm", "seed=0,1", *overrides(LINE)]
    subprocess.run(["train", "-m", *typed], env=environment, check=True, timeout=LIMIT_S)
    statuses = [read_json(path) for path in Path().glob("outputs/multirun/*/*/*/status.json")]
    assert [(each["state"], each["step"]) for each in statuses] == [("completed", 40)] * 2
    log = (tmp_path / "slurm" / "job-1" / "log").read_text()
    assert re.findall(r"job (\d+): exit code (\d+)", log) == [
        *(("1000", "255"), ("1000", "0")),  # submitit's own, behind `scontrol requeue`
        ("1001", "0"),
    ]
