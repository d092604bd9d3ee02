"""What a newcomer meets in the first hour: warnings once, memory that is not there, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT, OWN_CLASSES, OWN_RUN
from trainer.cli.exit_messages import piped
from trainer.commands.train import PLAN_FILE, without_repeated_warnings
from trainer.core.errors import DataError
from trainer.data.text import Text


def test_a_resumed_run_repeats_no_warning(tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(json.dumps({"warnings": ["old"]}))
    plan = {"steps": 3, "warnings": ["old", "new"]}
    assert without_repeated_warnings(plan, tmp_path) == {"steps": 3, "warnings": ["new"]}
    (tmp_path / PLAN_FILE).write_text("torn")
    assert without_repeated_warnings(plan, tmp_path) == plan


def test_a_field_that_the_first_record_lacks_is_answered_with_those_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\n{"body": "y"}\n')
    with pytest.raises(DataError, match=r"it has 'body', 'n'; type data\.field=body$"):
        Text(str(tmp_path / "a.jsonl"))


def test_what_only_shows_ends_silently_when_its_reader_leaves(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "--info", "searchpath"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


def test_what_only_shows_says_that_its_disk_is_full(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m trainer --help >/dev/full"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        check=False,
    )
    said = b"train: error: stdout: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (8, said)


def test_a_file_that_cannot_be_read_while_something_is_shown_is_not_called_stdout() -> None:
    with pytest.raises(FileNotFoundError), piped():
        Path("nowhere").read_text()


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_is_the_same_where_streams_are_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN_CLASSES)
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m trainer {OWN_RUN} {closed}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        check=False,
    )
    assert ended.returncode == 0
    (status,) = tmp_path.glob("outputs/*/*/status.json")
    assert json.loads(status.read_text())["state"] == "completed"
