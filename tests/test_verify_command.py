"""`train verify` as it is typed: exit code, verify.json, and what stands on the screen."""

from __future__ import annotations

import pytest

from tests.run_support import only_run, overrides, read_json
from trainer.cli import run as run_line

FIELDS = {"exact", "max_relative_error", "reference", "dtype", "culprits", "worst"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "code", "culprits"),
    [
        ("", 0, set()),
        ("accum=auto accum.micro=null", 0, set()),
        ("model.dropout=0.2", 9, {"dropout"}),
        ("model.norm=batch", 9, {"norm"}),
        ("model.norm=batch accum.micro=8", 0, set()),
        ("model._target_=tests.run_toys.LowNet", 9, {"parameters"}),
        ("batch.normalizer=micro_batches", 9, {"batch.normalizer=micro_batches"}),
    ],
    ids=["sound", "planned", "dropout", "batch norm", "one piece", "bf16 weights", "mean of means"],
)
def test_the_exit_code_the_file_and_the_screen_say_the_same(line, code, culprits, capsys):
    assert run_line(["verify", *overrides(line)]) == code
    report = read_json(only_run() / "verify.json")
    assert report.keys() >= FIELDS
    assert report["exact"] == (code == 0) == (report["max_relative_error"] <= 1e-10)
    assert {culprit["module"] for culprit in report["culprits"]} == culprits
    assert all(culprit["reason"] for culprit in report["culprits"])
    screen = capsys.readouterr().out
    assert ("not exact" in screen) == bool(culprits)
    assert all(name in screen for name in culprits)
    status = read_json(only_run() / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed" if code else "completed", code)


def test_nothing_is_trained_and_no_checkpoint_is_left():
    assert run_line(["verify", *overrides("")]) == 0
    assert not list(only_run().glob("checkpoints/*"))
    assert not (only_run() / "metrics.jsonl").exists()
