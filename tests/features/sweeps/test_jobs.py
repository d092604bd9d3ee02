"""When a job of a sweep asks submitit to put it back into Slurm's queue."""

import json
import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.core.run_folder import hold
from trainer.features.sweeps.jobs import STOP_FILE, SweepTask
from trainer.features.sweeps.table import value_of


def elsewhere(folder: Path, host: str) -> int:
    """Run a job of a sweep of another process; it ends with 75 where it runs."""
    sweep: Any = SimpleNamespace(folder=folder, slots=None)
    return SweepTask(sweep=sweep, host=host, pid=1, composer=sweep)._run_elsewhere(sweep)


@pytest.mark.parametrize(
    ("executor", "is_stopped"), [("slurm", False), ("slurm", True), ("", False)]
)
def test_a_job_is_requeued_by_submitit_under_slurm_unless_the_sweep_was_stopped(
    executor, is_stopped, tmp_path, monkeypatch
):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
    monkeypatch.setattr(SweepTask, "_run", lambda *_: 75)
    monkeypatch.setattr(SweepTask, "_watch", lambda *_: None)
    if is_stopped:
        (tmp_path / STOP_FILE).touch()
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    try:
        assert elsewhere(tmp_path, "another") == 75
        assert found == [signal.SIGUSR1] * (executor == "slurm" and not is_stopped)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert elsewhere(tmp_path, "another") == 75  # a process without a handler lives
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("ends", "code"), [("stopped", 75), ("killed", 75), ("going", 0)])
def test_a_job_begins_only_while_its_sweep_goes_on(ends, code, tmp_path, monkeypatch):
    monkeypatch.setattr(SweepTask, "_run", lambda *_: 0)
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    with nullcontext() if ends == "killed" else hold(tmp_path):
        if ends == "stopped":
            (tmp_path / STOP_FILE).touch()
        assert elsewhere(tmp_path, socket.gethostname()) == code


def test_a_job_that_its_own_time_ended_has_the_figures_of_its_last_evaluation(tmp_path):
    assert value_of(tmp_path, "eval_loss") is None
    lines = [{"step": n, "eval_loss": 9.0 - n, "eval_seconds": 1.0} for n in (1, 2)]
    journal = tmp_path / "metrics.jsonl"
    journal.write_text("".join(f"{json.dumps(each)}\n" for each in [*lines, {"step": 3}]))
    assert value_of(tmp_path, "eval_loss") == 7.0
    (tmp_path / "result.json").write_text('{"eval_loss": 3.0, "metrics": {}}')
    assert value_of(tmp_path, "eval_loss") == 3.0
