"""Real processes that are told to stop: saved at a step boundary, exit 75, and gone on with."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from tests.lib.nightly import nightly
from tests.lib.processes import Command
from tests.lib.run_support import TOYS, only_run, overrides, read_json, shell, steps
from tests.lib.run_toys import Plain
from trainer.core.signals import SIGNALS, UNBEGUN

LINE = "steps=100000 eval.every=null checkpoint.every=null scheduler=constant model.dropout=0.3"

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals"),
    pytest.mark.usefixtures("own_folder"),
]


WAITS = """
import time
from pathlib import Path
Path("here").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [SIGNALS[0], *map(nightly, SIGNALS[1:])])
def test_a_signal_before_there_is_a_run_ends_without_a_word_or_a_trace(number, tmp_path):
    """Hydra imports its plugins before anything is composed, so that one can hold it there."""
    (tmp_path / "hydra_plugins" / "slow").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "slow" / "__init__.py").write_text(WAITS)
    command = Command.start(Path.cwd(), overrides(LINE))
    command.wait_for("here")
    process = command.process
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode in (-number, 128 + number)
    assert err == ""
    assert not Path("outputs").exists()


def test_ctrl_c_before_the_first_step_ends_in_a_run_that_begins_again(monkeypatch, capsys):
    """While the samples of data without lengths are measured."""
    read, left = Plain.__getitem__, [signal.SIGINT]

    def stop_and_read(self, index):
        if left:
            os.kill(os.getpid(), left.pop())
        return read(self, index)

    monkeypatch.setattr(Plain, "__getitem__", stop_and_read)
    assert shell(shlex.join(overrides(f"data._target_={TOYS}.Plain steps=1"))) == 75
    (line,) = capsys.readouterr().err.splitlines()
    said, _, resume = line.partition(": go on with: train ")
    assert said == f"train: {UNBEGUN}"
    folder = only_run()
    assert read_json(folder / "status.json")["state"] == "preempted"
    assert read_json(folder / "status.json")["exit_code"] == 75
    assert not (folder / "checkpoints").exists()
    assert not (folder / "errors").exists()
    assert shell(resume) == 0
    assert only_run() == folder
    assert len(steps(folder)) == 1
