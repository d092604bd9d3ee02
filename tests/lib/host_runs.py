"""A run over two hosts that torchrun starts, of a class of one's own in `net.py`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lib.cli_support import CHECKOUT
from tests.lib.cluster import ADDRESSES, Hosts, wait_for

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


def start_on(
    hosts: Hosts, number: int, folder: Path, *words: str, **more: str
) -> subprocess.Popen[str]:
    """Start torchrun on one host, in a folder; of words that are given twice the last counts."""
    own = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
    own += [f"--local-addr={ADDRESSES[number]}", "--max-restarts=2"]
    typed = [*LINE, f"outputs={hosts.folder / 'outputs'}"]
    for word in words:
        (own if word.startswith("--") else typed).append(word)
    command = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "in", str(folder)]
    command += [sys.executable, "-m", *own, "-m", "trainer", *typed]
    paths = os.pathsep.join([str(folder), str(CHECKOUT)])
    return hosts.start(number, command, PYTHONPATH=paths, OMP_NUM_THREADS="1", **more)


def start(
    hosts: Hosts, folders: Sequence[Path], *words: str, **more: str
) -> list[subprocess.Popen[str]]:
    """Start torchrun on both hosts, each in its folder."""
    pairs = enumerate(folders)
    return [start_on(hosts, number, folder, *words, **more) for number, folder in pairs]


def codes(hosts: Hosts, agents: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Wait for the end of both, and give the exit codes."""
    wait_for(lambda: all(agent.poll() is not None for agent in agents), hosts)
    return [agent.returncode for agent in agents]


def started(hosts: Hosts, folders: Sequence[Path], *words: str, **more: str) -> list[int]:
    """Start torchrun on both hosts, each in its folder, and give the exit codes."""
    return codes(hosts, start(hosts, folders, *words, **more))


def weights(hosts: Hosts, name: str = "gpt") -> bytes:
    """Read the bytes of the weights that the one run of a name ended with."""
    (run,) = hosts.folder.glob(f"outputs/*/*-{name}")
    return max(run.glob("checkpoints/step-*/model.safetensors")).read_bytes()
