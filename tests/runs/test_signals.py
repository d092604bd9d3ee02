"""Real processes that are told to stop: saved at a step boundary, exit 75, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lib.nightly import nightly
from tests.lib.processes import Command
from tests.lib.run_support import (
    curve,
    go,
    on,
    only_run,
    overrides,
    read_json,
    steps,
)
from trainer.checkpoint.store import CheckpointStore
from trainer.cli.main import FinishedRun

LINE = "steps=100000 eval.every=null checkpoint.every=null scheduler=constant model.dropout=0.3"

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals"),
    pytest.mark.usefixtures("own_folder"),
]


def started(line: str, pattern: str = "outputs/*/*/metrics.jsonl") -> subprocess.Popen[str]:
    """Start a run in a process group of its own, and wait until it left what matches."""
    command = Command.start(Path.cwd(), overrides(line))
    command.wait_for(pattern)
    return command.process


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 0), nightly(signal.SIGTERM, 2)], ids=str
)
def test_a_signal_saves_at_the_step_boundary_and_the_run_goes_on(number, workers):
    """To the whole group, whose loading processes must outlive it."""
    process = started(f"{LINE} num_workers={workers} 'hooks=[tests.lib.run_toys.Slow]'")
    os.killpg(process.pid, number)  # as a terminal or a scheduler does: the whole group
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert "stopped after step " in err
    assert "error" not in err
    assert "train resume=" in err
    folder = only_run()
    status = read_json(folder / "status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    (step,) = CheckpointStore(folder / "checkpoints").steps()
    assert step == status["step"] == len(steps(folder))
    part = FinishedRun(folder=folder, exit_code=75, result={})
    more = on(part, f"steps={step + 2} resume_allow=[steps] num_workers=0")
    assert curve(more, "loss") == curve(go(f"{LINE} steps={step + 2}"), "loss")


NUMBERS = [signal.SIGINT, *map(nightly, (signal.SIGTERM, signal.SIGUSR1))]
WAITS = """
import time
from pathlib import Path
Path("here").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_there_is_a_run_ends_without_a_word_or_a_trace(number, tmp_path):
    """Hydra imports its plugins before anything is composed, so that one can hold it there."""
    (tmp_path / "hydra_plugins" / "slow").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "slow" / "__init__.py").write_text(WAITS)
    process = started(LINE, "here")
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode in (-number, 128 + number)
    assert err == ""
    assert not Path("outputs").exists()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_torch_is_there_ends_in_a_run_that_begins_again(number, tmp_path):
    process = started(f"{LINE} steps=1", "outputs/*/*")
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    (line,) = err.splitlines()
    assert line.startswith("train: stopped before it took a step: go on with: train resume=")
    folder = only_run()
    status = read_json(folder / "status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert not (folder / "checkpoints").exists()
    assert not (folder / "errors").exists()
    assert "Traceback" not in (folder / "train.log").read_text()
    again = on(FinishedRun(folder=folder, exit_code=75, result={}))
    assert again.folder == folder
    assert len(steps(again)) == 1
