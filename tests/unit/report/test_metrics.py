"""metrics.jsonl, samples.jsonl, the environment: exact keys, strict JSON, mended, whole if full."""

import errno
import json
import math
import subprocess
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.support import STEP_KEYS
from tests.unit.report.test_blocks import record
from trainer.core import durable
from trainer.core.errors import SaveError
from trainer.core.run_folder import RunFolder
from trainer.report import records
from trainer.report.journal import read, to_line, truncate_after
from trainer.report.metrics import MetricsLog


def strictly(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


class Full(durable.FileSystem):
    """A disk that takes some bytes and then is full, until there is room again."""

    def __init__(self, room: float):
        self.room = room

    def write(self, handle, data):
        count = int(min(len(data), self.room))
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= count
        return super().write(handle, data[:count])


def test_entries_are_written_at_once_and_numbers_that_json_does_not_know_are_null(tmp_path):
    log, grad_norm = MetricsLog(tmp_path, pytest.fail, keep_samples=True), torch.tensor(0.75)
    more = {"skipped": "not finite", "replays": 2, "noise_scale": torch.tensor(12.0)}
    log.step(record(loss=torch.tensor(math.nan), padding=math.inf, grad_norm=grad_norm, **more))
    log.evaluation(1, {"": {"loss": math.nan, "accuracy": 0.3}}, 1.5)
    grad_norm.zero_()  # the file does not lag on a CPU
    step, evaluation = strictly(tmp_path / RunFolder.METRICS)
    assert tuple(step) == (*STEP_KEYS, *more)
    assert {name: step[name] for name in more} == more
    assert (step["loss"], step["padding"], step["grad_norm"]) == (None, None, 0.75)
    assert evaluation == {"step": 1, "eval_loss": None, "eval_accuracy": 0.3, "eval_seconds": 1.5}
    log.consumed(1, np.array([4, 2]))
    log.consumed(2, [7], skipped=[9])
    assert strictly(tmp_path / RunFolder.SAMPLES) == [
        {"step": 1, "ids": [4, 2]},
        {"step": 2, "ids": [7], "skipped": [9]},
    ]


@given(
    steps=st.lists(st.integers(1, 30), max_size=20).map(sorted),
    last=st.integers(0, 30),
    torn=st.integers(0, 40),
)
def test_mending_keeps_whole_lines_up_to_the_step_and_nothing_else(
    tmp_path_factory, steps, last, torn
):
    path = tmp_path_factory.mktemp("run") / RunFolder.METRICS
    content = b"".join(to_line({"step": step, "loss": 1.0}) for step in steps)
    path.write_bytes(content[: max(0, len(content) - torn)])
    whole = [entry["step"] for entry in read(path)]
    truncate_after(path, last)
    assert [entry["step"] for entry in strictly(path)] == [s for s in whole if s <= last]
    mended = path.read_bytes()
    truncate_after(path, last)
    assert path.read_bytes() == mended
    assert [p.name for p in path.parent.iterdir()] == [RunFolder.METRICS]


def test_a_full_disk_stops_nothing_is_told_once_and_loses_no_line(tmp_path):
    warnings: list[str] = []
    log, disk = MetricsLog(tmp_path, warnings.append), Full(room=450)
    with durable.use(disk):
        for step in range(1, 6):
            log.step(record(step))
        assert [e["step"] for e in read(tmp_path / RunFolder.METRICS)] == [1]
        with pytest.raises(SaveError, match=RunFolder.METRICS):
            log.sync()
        disk.room = math.inf
        log.step(record(6))
        log.sync()
    assert [e["step"] for e in strictly(tmp_path / RunFolder.METRICS)] == [1, 2, 3, 4, 5, 6]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]


def test_a_run_records_versions_and_the_revision_and_waits_for_no_git_that_hangs(
    tmp_path, monkeypatch
):
    assert records.environment()["versions"]["torch"] == torch.__version__

    def git(*arguments):
        line = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run([*line, *arguments], check=True, timeout=30)

    git("init", "-q")
    assert records.git_revision(tmp_path) is None
    (tmp_path / ".gitattributes").write_text("* filter=own diff=own\n")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".gitattributes", "code.py")
    git("commit", "-q", "-m", "first")
    found = records.git_revision(tmp_path)
    assert (len(found["commit"]), found["changed_files"]) == (40, 0)
    # What the repository's own settings name is not started.
    started = f"touch {tmp_path / 'started'}; cat"
    for key in ("core.fsmonitor", "filter.own.clean", "diff.external", "diff.own.textconv"):
        git("config", key, started)
    (tmp_path / "code.py").write_text("a = 2\n")
    assert records.git_revision(tmp_path)["changed_files"] == 1
    assert not (tmp_path / "started").exists()
    monkeypatch.setattr(records, "GIT_TIMEOUT_S", 0.2)
    hanging = tmp_path / "git"
    hanging.write_text("#!/bin/sh\nexec sleep 200\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = time.monotonic()
    assert records.git_revision(tmp_path) is None
    assert time.monotonic() - started < 100
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert records.git_revision(tmp_path) is None
