"""What the tests of the command line share: a user's own folder, and ways to run a command."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli.argv import split_argv
from trainer.cli.compose import Composer, Job
from trainer.cli.prepare import prepare_run

CHECKOUT = Path(__file__).parents[2]

OWN_CLASSES = """
from tests.lib import run_toys


class Net(run_toys.Net):
    def __init__(self, width=8, depth=1):
        super().__init__(width)


class Data(run_toys.Rows):
    def __init__(self, size=24):
        super().__init__(size)


def broken(width=8):
    raise RuntimeError("a fault in the user's own class")


class Exits:
    def on_step(self, entry):
        if entry["step"] == 2:
            raise SystemExit(3)


def interrupted(width=8):
    raise KeyboardInterrupt


A = B = Cut = Goal = Hook = Opt = Rate = Sum = Sync = None  # names that are looked up, never used
"""

OWN_RUN = (
    "model._target_=net.Net data._target_=net.Data batch.global=8 accum=fixed accum.micro=3 "
    "steps=2 wandb.mode=disabled device=cpu"
)
"""A whole run that takes a fraction of a second: a model and data of one's own."""


def make_own_folder(folder: Path, patch: pytest.MonkeyPatch, source: str = OWN_CLASSES) -> None:
    """Stand in a folder with a module `net` in it, as whoever types a command does."""
    if joblib := sys.modules.get("joblib"):  # its processes stay in the folder of an earlier test
        joblib.externals.loky.get_reusable_executor().shutdown()
    (folder / "net.py").write_text(source)
    patch.chdir(folder)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    patch.delitem(sys.modules, "net", raising=False)


def prepared(line: str) -> Job:
    """Check a command line, and start nothing."""
    request = split_argv(shlex.split(line))
    return prepare_run(request.lines, Composer.of(request.flags.get("--config-dir")))


def python(
    line: str, folder: Path, limit_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a line of Python's own in a folder, with the checkout on its path."""
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *shlex.split(line)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def faults(err: str) -> list[str]:
    """The faults on stderr, which holds nothing else."""
    lines = err.splitlines()
    assert all(line.startswith("train: error: ") for line in lines), err
    return [line.removeprefix("train: error: ") for line in lines]
