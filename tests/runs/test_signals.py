"""Real processes that are told to stop: saved at a step boundary, exit 75, and gone on with."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.run_support import (
    assert_same_bits,
    curve,
    go,
    on,
    only_run,
    overrides,
    read_json,
    shell,
    state,
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
    # Where these tests run behind a shell's `&` they ignore Ctrl-C, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *overrides(line)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 200
    while not list(Path().glob(pattern)):
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
    whole = go(f"{LINE} steps={step}")
    assert_same_bits(state(part), state(whole))
    more = on(part, f"steps={step + 3} resume_allow=[steps]")
    assert curve(more, "loss") == curve(go(f"{LINE} steps={step + 3}"), "loss")


WAITS = """
import time
from pathlib import Path
Path("here").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_there_is_a_run_ends_without_a_word_or_a_trace(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Hydra imports its plugins before anything is composed, so that one can hold it there."""
    (tmp_path / "hydra_plugins" / "slow").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "slow" / "__init__.py").write_text(WAITS)
    process = started(LINE, "here")
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert process.returncode in (-number, 128 + number)
    assert (out, err) == ("", "")
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGTERM, signal.SIGUSR1)),
    ],
)
def test_a_signal_before_torch_is_there_ends_in_a_run_that_begins_again(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = started(f"{LINE} steps=3", "outputs/*/*")
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    (said,) = err.splitlines()
    assert said.startswith("train: stopped before it took a step: go on with: train resume=")
    folder = only_run()
    assert read_json(folder / "status.json")["state"] == "preempted"
    assert read_json(folder / "status.json")["exit_code"] == 75
    assert not (folder / "checkpoints").exists()
    assert not (folder / "errors").exists()
    assert "Traceback" not in (folder / "train.log").read_text()
    again = on(FinishedRun(folder=folder, exit_code=75, result={}))
    assert again.folder == folder
    assert curve(again, "loss") == curve(go(f"{LINE} steps=3"), "loss")


@pytest.mark.nightly
def test_a_scheduler_that_warns_and_queues_again_needs_one_command(tmp_path: Path) -> None:
    """As Slurm does with `--signal=B:USR1@60 --requeue`: the same line, started three times."""
    line = f"{LINE} steps=100 name=job resume=auto 'hooks=[tests.lib.run_toys.Slow]'"
    ends = []
    for _ in range(2):
        process = started(line, "outputs/*/*job/metrics.jsonl")
        while len(steps(only_run())) <= max(ends, default=0):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=200)
        assert process.returncode == 75, err
        assert "Traceback" not in err
        ends.append(read_json(only_run() / "status.json")["step"])
    assert 0 < ends[0] < ends[1] < 100
    assert shell(" ".join(map(shlex.quote, overrides(line)))) == 0
    assert [entry["step"] for entry in steps(only_run())] == list(range(1, 101))
    whole = go(f"{LINE} steps=100 name=whole")
    assert curve(only_of("job"), "loss") == curve(whole, "loss")


def only_of(name: str) -> Path:
    (folder,) = Path().glob(f"outputs/*/*-{name}")
    return folder.absolute()
