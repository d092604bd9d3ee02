"""When a job of a sweep asks submitit to put it back into Slurm's queue."""

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cli.sweep_jobs import SweepTask, value_of


@pytest.mark.parametrize(
    ("executor", "is_stopped", "signals"),
    [
        ("slurm", False, [signal.SIGUSR1]),
        ("slurm", True, []),
        ("local", False, []),
        ("", False, []),
    ],
)
def test_a_job_is_requeued_by_submitit_under_slurm_unless_the_sweep_was_stopped(
    executor, is_stopped, signals, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
    monkeypatch.setattr(SweepTask, "_run", lambda *_: 75)
    sweep: Any = SimpleNamespace(folder=tmp_path, slots=None)
    own: dict[str, Any] = {"composer": None, "own_folder": None, "safe_path": None}
    task = SweepTask(sweep=sweep, process=("elsewhere", os.getpid()), **own)
    if is_stopped:
        (tmp_path / ".stop").write_text(".")
    monkeypatch.setattr(SweepTask, "_watch", lambda *_: None)
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    try:
        assert task._run_elsewhere([], tmp_path, 0) == 75
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if not signals:
            assert task._run_elsewhere([], tmp_path, 0) == 75  # a process without a handler lives
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == signals


def test_a_job_that_its_own_time_ended_has_the_figures_of_its_last_evaluation(tmp_path):
    assert value_of(tmp_path, "eval_loss") is None
    lines = [{"step": n, "eval_loss": 9.0 - n, "eval_seconds": 1.0} for n in (1, 2)]
    journal = tmp_path / "metrics.jsonl"
    journal.write_text("".join(f"{json.dumps(each)}\n" for each in [*lines, {"step": 3}]))
    assert value_of(tmp_path, "eval_loss") == 7.0
    (tmp_path / "result.json").write_text('{"eval_loss": 3.0, "metrics": {}}')
    assert value_of(tmp_path, "eval_loss") == 3.0
