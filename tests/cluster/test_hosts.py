"""Runs over two hosts that torchrun starts: a rank that is lost, and hosts that differ."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.cluster import ADDRESSES, Hosts, wait_for
from tests.lib.nightly import LIMIT_S
from tests.lib.run_support import read_json, steps

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)]

OWN = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        time.sleep(0.1)
        mark = Path("killed")
        if self.calls == 8 and os.environ["RANK"] == os.environ.get("KILLED") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": drawn, "labels": torch.tensor(index % 3)}
"""
LINE = (
    *("model._target_=net.Net", "data._target_=net.Rows", "objective=classify", "batch.global=8"),
    *("accum=fixed", "accum.micro=2", "steps=10", "checkpoint.every=2", "eval.every=null"),
    *("logger=[]", "device=cpu", "precision=fp32", "name=gpt", "resume=auto"),
)
C10D = ("--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500", "--rdzv-id=job")
STATIC = (f"--master-addr={ADDRESSES[0]}", "--master-port=29500")


def started(hosts: Hosts, folders: Sequence[Path], *words: str, **more: str) -> list[int]:
    """Start torchrun on both hosts, each in its folder, and give the exit codes."""
    agents = []
    for number, folder in enumerate(folders):
        own = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
        own += [f"--local-addr={ADDRESSES[number]}", "--max-restarts=2", *words, "-m", "trainer"]
        line = [sys.executable, "-m", *own, *LINE, f"outputs={hosts.folder / 'outputs'}"]
        command = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "in", str(folder), *line]
        paths = os.pathsep.join([str(folder), str(CHECKOUT)])
        agents.append(hosts.start(number, command, PYTHONPATH=paths, OMP_NUM_THREADS="1", **more))
    wait_for(lambda: all(agent.poll() is not None for agent in agents), hosts)
    return [agent.returncode for agent in agents]


@pytest.mark.parametrize("rendezvous", [C10D, STATIC], ids=["c10d", "static"])
@pytest.mark.parametrize("killed", "01")
def test_a_rank_that_is_killed_once_is_started_again_and_the_run_completes(
    killed, rendezvous, hosts
):
    (hosts.folder / "net.py").write_text(OWN)
    codes = started(hosts, [hosts.folder] * 2, *rendezvous, KILLED=killed)
    assert codes == [0, 0], hosts.printed()
    assert (hosts.folder / "killed").exists()
    (run,) = hosts.folder.glob("outputs/*/*-gpt")
    assert read_json(run / "status.json")["state"] == "completed"
    assert [entry["step"] for entry in steps(run)] == [*range(1, 11)]
    assert (run / ".hydra" / "resumed").is_dir()


@pytest.mark.parametrize("other", ["trainer", "net"])
def test_hosts_with_other_code_are_refused_in_a_line_that_names_them(other, hosts):
    folders = [hosts.folder / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "net.py").write_text(OWN)
    if other == "net":
        (folders[1] / "net.py").write_text(OWN.replace("index % 3", "index % 2"))
    else:
        for name in ("trainer", "conf", "recipes"):
            shutil.copytree(CHECKOUT / name, folders[1] / name)
        schedules = folders[1] / "trainer" / "optim" / "schedules.py"
        schedules.write_text(f"{schedules.read_text()}\nCHANGED = True\n")
    codes = started(hosts, folders, *C10D, "--max-restarts=0")
    assert all(codes), hosts.printed()
    errors = [line for line in hosts.printed().splitlines() if line.startswith("train: error")]
    says = {"trainer": "step-trainer: rank 1 (", "net": "net: its file on two (rank 1) differs"}
    assert errors, hosts.printed()
    assert all(says[other] in line and "two" in line and "one" in line for line in errors)
