"""Real processes that are told to stop: saved at a step boundary, exit 75, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli_support import CHECKOUT
from tests.run_support import (
    assert_same_bits,
    curve,
    go,
    on,
    only_run,
    overrides,
    read_json,
    state,
    steps,
)
from trainer.checkpoint.store import CheckpointStore
from trainer.cli import Run

LINE = "steps=100000 eval.every=null checkpoint.every=null scheduler=constant model.dropout=0.3"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(line: str) -> subprocess.Popen[str]:
    """Start a run in a process group of its own, and wait until it takes steps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *overrides(line)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(Path().glob("outputs/*/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_saves_at_the_step_boundary_and_the_run_goes_on(
    number: signal.Signals, workers: int
) -> None:
    process = started(f"{LINE} num_workers={workers}")
    os.killpg(process.pid, number)  # as a terminal or a scheduler does: the whole group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "stopped after step " in err
    assert "error" not in err
    assert "train resume=" in out
    folder = only_run()
    status = read_json(folder / "status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    (step,) = CheckpointStore(folder / "checkpoints").steps()
    assert step == status["step"] == len(steps(folder))
    part = Run(folder=folder, exit_code=75, result={})
    whole = go(f"{LINE} steps={step}")
    assert_same_bits(state(part), state(whole))
    more = on(part, f"steps={step + 3} resume_allow=[steps]")
    assert curve(more, "loss") == curve(go(f"{LINE} steps={step + 3}"), "loss")
