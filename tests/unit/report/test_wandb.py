"""W&B as a mirror: everything arrives, and nothing it does reaches training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from trainer.report.journal import METRICS_FILE
from trainer.report.wandb import WandbMirror, WandbSettings, shown_config
from trainer.report.wandb_process import Follower, row

LONG_S = 20
"""What a busy machine may need for what takes a second; what hangs takes a minute."""

# Stands in for the package in the mirror's process: writes down what it is told, or misbehaves.
STAND_IN = """
import json, os, sys, time
class Settings:
    model_fields = {"x_stats_pid": None}
    def __init__(self, **given): self.given = given
class Run:
    def __init__(self, given):
        self.file = open(given["dir"] + "/told.jsonl", "a", buffering=1)
        settings = given.pop("settings").given
        self.tell("init", given | {"settings": settings, "tty": sys.stdin.isatty()})
        self.summary = self
    def tell(self, what, value): self.file.write(json.dumps([what, value]) + "\\n")
    def log(self, row, step): self.tell("log", [step, row])
    def update(self, summary): self.tell("summary", summary)
    def finish(self, exit_code):
        if os.environ["FAULT"] == "hang in finish": time.sleep(60)
        self.tell("finish", exit_code)
def init(**given):
    print("chatter")
    fault = os.environ["FAULT"]
    if fault == "hang in init": time.sleep(60)
    if fault == "never" or (fault == "no network" and given["mode"] == "online"):
        raise RuntimeError("cannot connect")
    return Run(given)
"""


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Make a mirror whose wandb is the stand-in above, and read what that was told."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    folder = tmp_path / "run"
    folder.mkdir()
    warnings: list[str] = []

    def make(fault="", *, mode="offline", close_timeout_s=20.0, **settings):
        monkeypatch.setenv("FAULT", fault)
        return WandbMirror(
            WandbSettings(mode=mode, **settings),
            folder,
            {"batch": {"global": 8}, "api_key": "hidden", "path": folder},
            warnings.append,
            close_timeout_s=close_timeout_s,
        )

    def told():
        return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]

    make.folder, make.warnings, make.told = folder, warnings, told
    return make


def write(folder, *steps):
    with (folder / METRICS_FILE).open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps)


def test_steps_and_evaluations_arrive_in_order_under_their_names(mirror):
    run = mirror(project="p", group="g", tags=("a", "b"), name="n")
    write(mirror.folder, 1, 2)
    with (mirror.folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "eval_loss": 2.5}\n{"step": 3, "lo')
    run.close({"loss": 1.0, "eval_loss": float("nan")})
    told = mirror.told()
    assert told[1:] == [
        ["log", [1, {"train/loss": 1.0}]],
        ["log", [2, {"train/loss": 1.0}]],
        ["log", [2, {"eval/loss": 2.5}]],
        ["summary", {"loss": 1.0, "eval_loss": None}],
        ["finish", 0],
    ]
    begun = told[0][1]
    assert begun["mode"] == "offline"
    assert (begun["project"], begun["group"]) == ("p", "g")
    assert (begun["tags"], begun["name"], begun["job_type"]) == (["a", "b"], "n", "train")
    assert begun["config"]["batch"] == {"global": 8}
    assert begun["config"]["api_key"] == "***"
    assert begun["settings"]["console"] == "off"
    assert begun["settings"]["x_stats_pid"] == os.getpid()
    assert not begun["tty"]
    assert not mirror.warnings


def test_a_resume_keeps_the_id_and_sends_only_what_is_new(mirror):
    first = mirror()
    write(mirror.folder, 1, 2)
    first.close({})
    second = mirror()
    write(mirror.folder, 3)
    second.close({})
    told = mirror.told()
    ids = {value["id"] for what, value in told if what == "init"}
    assert len(ids) == 1
    assert [value[0] for what, value in told if what == "log"] == [1, 2, 3]


def test_an_id_that_the_folder_lost_is_the_one_that_a_checkpoint_kept(mirror):
    first = mirror()
    first.close({})
    (mirror.folder / "wandb" / "id").unlink()
    second = mirror(run_id=first.run_id)
    second.close({})
    assert second.run_id == first.run_id
    assert (mirror.folder / "wandb" / "id").read_text() == first.run_id
    third = mirror(run_id="another")
    third.close({})
    ids = {value["id"] for what, value in mirror.told() if what == "init"}
    assert ids == {first.run_id} == {third.run_id}


def test_without_a_network_the_run_is_recorded_offline_with_one_warning(mirror):
    run = mirror("no network", mode="online")
    write(mirror.folder, 1)
    run.close({})
    assert [what for what, _ in mirror.told()] == ["init", "log", "summary", "finish"]
    (warning,) = mirror.warnings
    assert "cannot connect" in warning
    assert "wandb sync" in warning


def test_a_wandb_that_cannot_start_is_off_with_one_warning(mirror):
    run = mirror("never", mode="online")
    write(mirror.folder, 1)
    run.close({})
    (warning,) = mirror.warnings
    assert "W&B is off" in warning


@pytest.mark.parametrize("fault", ["hang in init", "hang in finish"])
def test_a_wandb_that_hangs_holds_the_end_of_a_run_for_seconds_only(mirror, fault):
    run = mirror(fault, close_timeout_s=1.5)
    write(mirror.folder, 1)
    started = time.monotonic()
    run.close({})
    run.close({})
    assert time.monotonic() - started < LONG_S
    (warning,) = mirror.warnings
    assert "did not finish in time" in warning


def test_starting_the_mirror_does_not_wait_for_wandb(mirror):
    started = time.monotonic()
    run = mirror("hang in init", close_timeout_s=0.1)
    assert time.monotonic() - started < LONG_S
    run.close()


def test_a_run_that_failed_is_marked_as_failed(mirror):
    mirror().close()
    assert mirror.told()[-1] == ["finish", 1]


def test_a_disabled_mirror_does_nothing(mirror):
    mirror(mode="disabled").close({})
    assert not list(mirror.folder.iterdir())


def test_the_real_package_records_a_run_offline(tmp_path):
    warnings: list[str] = []
    settings = WandbSettings(project="test")
    mirror = WandbMirror(settings, tmp_path, {}, warnings.append, close_timeout_s=30)
    write(tmp_path, 1, 2, 3)
    mirror.close({"loss": 1.0})
    run_id = (tmp_path / "wandb" / "id").read_text()
    assert list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert not warnings


def test_secrets_are_hidden_and_tokens_of_text_are_not():
    config = {
        "batch": {"unit": "tokens", "normalizer": "tokens"},
        "accum": {"max_tokens": 4096},
        "data": {"hf_token": "abc", "password": "x", "empty_secret": None},
        "list": [{"apiKey": "y"}, {1}],
    }
    assert shown_config(config) == {
        "batch": {"unit": "tokens", "normalizer": "tokens"},
        "accum": {"max_tokens": 4096},
        "data": {"hf_token": "***", "password": "***", "empty_secret": None},
        "list": [{"apiKey": "***"}, [1]],
    }


def test_a_follower_reads_whole_lines_once(tmp_path):
    path = tmp_path / "lines.jsonl"
    follower = Follower(path, 0)
    assert list(follower.new()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(follower.new()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\ntorn\n{"step": 3}\n')
    assert list(follower.new()) == [{"step": 2}, {"step": 3}]
    assert list(follower.new()) == []


def test_a_row_holds_numbers_under_their_section():
    entry = {"step": 1, "loss": 2.0, "grad_norm": None, "skipped": "not finite", "eval_loss": 3.0}
    assert row(entry) == {"train/loss": 2.0, "train/skipped": 1, "eval/loss": 3.0}


def test_wandb_is_not_imported_in_the_training_process():
    program = "import sys, trainer.report.reporter; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
