"""A run that is killed and goes on: every tracker has each step once, and none is missing."""

import json
import os
import shlex
import time

import pytest

from tests.lib.cli_support import python
from tests.lib.nightly import nightly
from tests.lib.tracked import mirror_of, mlflow_steps, tensorboard_steps, wandb_steps
from trainer.features.trackers.mlflow import MlflowTracker
from trainer.features.trackers.tensorboard import TensorBoardTracker
from trainer.features.trackers.wandb import WandbTracker
from trainer.report.journal import truncate_after
from trainer.report.mirror import close_all

TRACKERS = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker, "mlflow": MlflowTracker}
STEPS = {"wandb": wandb_steps, "tensorboard": tensorboard_steps, "mlflow": mlflow_steps}


def lines(first, last):
    for step in range(first, last + 1):
        yield {"step": step, "loss": 1 / step, "samples": 8 * step}
        if step % 10 == 0:
            yield {"step": step, "eval_loss": 2 / step, "eval_seconds": 1}


def write(folder, first, last):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines(first, last))


def mirrors(names, folder, warnings, resumed_step=None):
    (folder / "plan.json").write_text('{"global_batch": 8}')
    made, more = [], {"resumed_step": resumed_step, "group": "sweep"}
    for name in names:
        tracker = TRACKERS[name]()
        tracker.patience_s = 100.0  # whatever else the machine does
        made.append(mirror_of(name, tracker, folder, warnings.append, **more))
    for mirror in made:
        mirror.start()
    return made


def logged(names, folder):
    files = [folder / name / "logged" for name in names]
    return min(int(file.read_text()) if file.exists() else 0 for file in files)


def run_until_killed(folder, *names):
    """Log 60 steps, which all trackers have, and 20 of which each has some."""
    mirrors(names, folder, [])
    write(folder, 1, 60)
    while logged(names, folder) < 60:
        time.sleep(0.05)
    write(folder, 61, 80)
    time.sleep(0.5)
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("names", [("tensorboard",), nightly(("wandb", "mlflow"))])
def test_after_a_kill_each_step_is_there_once_wherever_the_run_goes_on(
    names, tmp_path, monkeypatch
):
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    program = (
        "import sys; from pathlib import Path; from tests.features.trackers import test_resumed\n"
    )
    program += "test_resumed.run_until_killed(Path(sys.argv[1]), *sys.argv[2:])"
    done = python(shlex.join(["-c", program, str(folder), *names]), tmp_path)
    assert done.returncode == -9, done.stderr
    warnings: list[str] = []
    for resumed, last in ((80, 90), (50, 100)):
        truncate_after(folder / "metrics.jsonl", resumed)
        made = mirrors(names, folder, warnings, resumed)
        write(folder, resumed + 1, last)
        close_all(made, {"loss": 1.0})
        assert not warnings
        for name in names:
            found = STEPS[name](tmp_path / "mlflow.db" if name == "mlflow" else folder / name)
            highest = max(last, 90)
            assert found["train/loss"] == [*range(1, highest + 1)], name
            assert found["train/samples"] == [*range(1, highest + 1)], name
            assert found["eval/loss"] == [*range(10, highest + 1, 10)], name
