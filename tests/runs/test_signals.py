"""Real processes that are told to stop: saved at a step boundary, exit 75, and gone on with."""

import os
import signal
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.nightly import nightly
from tests.lib.processes import Command
from tests.lib.run_support import overrides, read_json, steps
from trainer.core.signals import SIGNALS

LINE = "steps=100000 eval.every=null checkpoint.every=null scheduler=constant model.dropout=0.3"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


WAITS = """
import time
from pathlib import Path
Path("here").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [SIGNALS[0], *map(nightly, SIGNALS[1:])])
def test_a_signal_before_there_is_a_run_ends_without_a_word_or_a_trace(number, tmp_path):
    """A plugin that is named is imported before anything is composed, and can hold it there."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup ignores, processes inherit
    (tmp_path / "hydra_plugins" / "slow").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "slow" / "__init__.py").write_text(WAITS)
    paths = os.pathsep.join([str(CHECKOUT), str(tmp_path)])  # plugins here are not looked for
    command = Command.start(Path.cwd(), overrides(f"{LINE} hydra/launcher=slow"), PYTHONPATH=paths)
    command.wait_for("here")
    process = command.process
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode in (-number, 128 + number)
    assert err == ""
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    "typed", [nightly("num_workers=1"), nightly("parallel=ddp parallel.ranks=2")]
)
def test_a_closed_terminal_saves_but_where_the_hang_up_is_ignored_as_under_nohup(typed):
    """A terminal's signals reach its whole process group, loading processes too."""
    words = overrides(f"{LINE} {typed}")
    for disposition in (signal.SIG_IGN, signal.SIG_DFL):
        folder = Path(disposition.name).absolute()
        before = signal.signal(signal.SIGHUP, disposition)
        command = Command.start(Path.cwd(), [*words, f"hydra.run.dir={folder}"])
        signal.signal(signal.SIGHUP, before)
        taken = command.wait_for(f"{folder.name}/metrics.jsonl", 3).read_bytes().count(b"\n")
        os.killpg(command.process.pid, signal.SIGHUP)
        if disposition == signal.SIG_IGN:
            command.wait_for(f"{folder.name}/metrics.jsonl", taken + 5)
            command.process.send_signal(signal.SIGTERM)
        assert command.end().code == 75
        status = read_json(folder / "status.json")
        assert (status["state"], status["step"]) == ("preempted", len(steps(folder)))
        assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()
