"""Sweeps over launchers and sweepers that are installed beside Hydra: joblib, submitit, Optuna."""

import csv
import math
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.cli_support import CHECKOUT, OWN_CLASSES, OWN_RUN, faults, make_own_folder
from tests.lib.nightly import nightly
from tests.lib.processes import Command
from tests.lib.run_support import TOYS, read_json, shell
from trainer.features.sweeps.jobs import Slots
from trainer.features.sweeps.sweep import cover

SEEN = """
import os
from pathlib import Path

_broken, _Net = broken, Net


def note_threads():
    Path(f"threads-{os.getpid()}").write_text(os.environ.get("OMP_NUM_THREADS", ""))


def broken(width=8):
    note_threads()
    return _broken(width)


class Net(_Net):
    def __init__(self, width=8):
        super().__init__(width)
        note_threads()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch, OWN_CLASSES + SEEN)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}")


def table() -> tuple[Path, list[dict[str, str]]]:
    (path,) = Path().glob("outputs/multirun/*/*/sweep.csv")
    with path.open() as file:
        return path.parent.absolute(), list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", nightly("submitit_local")])
def test_jobs_in_other_processes_are_ranked_with_reasons_and_are_not_run_twice(launcher, capsys):
    line = f"-m {OWN_RUN.replace('net.Net', 'net.broken,net.Net')} hydra/launcher={launcher}"
    assert shell(line) == 1
    sweep, rows = table()
    assert [row["rank"] for row in rows] == ["1", ""]
    assert [row["exit_code"] for row in rows] == ["0", "1"]
    fault = "RuntimeError: a fault in the user's own class (net.py:"
    assert rows[1]["reason"].startswith(fault)
    assert f"job 0: {fault}" in capsys.readouterr().out
    threads = {path.name: path.read_text() for path in Path().glob("threads-*")}
    assert f"threads-{os.getpid()}" not in threads, "in a process of its own"
    assert set(threads.values()) == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    before = (sweep / "1" / "result.json").read_bytes()
    assert shell(f"{line} resume=auto") == 1
    assert table()[0] == sweep
    assert (sweep / "1" / "result.json").read_bytes() == before


def test_a_sweep_whose_jobs_all_fail_alike_ends_with_their_code(capsys):
    assert shell(f"-m {OWN_RUN} model.widht=3,4") == 2
    assert capsys.readouterr().out.count("model.widht: Net takes no such argument.") == 2


@pytest.mark.slow
def test_a_search_maximises_the_metric_and_goes_on_with_the_same_values(capsys):
    search = "'optimizer.lr=tag(log,interval(1e-3,1))' model._target_=net.Net,net.broken"
    line = f"-m {OWN_RUN.replace('model._target_=net.Net', search)} hydra/sweeper=optuna"
    line += " sweep.metric=eval_accuracy seed=3"
    assert shell(f"{line} hydra.sweeper.n_trials=2") == 1
    sweep, first = table()
    assert {row["state"] for row in first} == {"completed", "failed"}, "one that fails ends nothing"
    before = {path: path.read_bytes() for path in sweep.glob("*/result.json")}
    assert shell(f"{line} hydra.sweeper.n_trials=3 resume=auto") == 1
    again, rows = table()
    assert again == sweep
    assert {path: path.read_bytes() for path in before} == before
    rates = {row["job"]: row["optimizer.lr"] for row in rows}
    assert len(rates) == 3
    assert {row["job"]: row["optimizer.lr"] for row in first}.items() <= rates.items()
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    completed = [row for row in rows if row["state"] == "completed"]
    assert found["best_value"] == max(float(row["eval_accuracy"]) for row in completed)
    assert completed[0]["rank"] == "1"
    assert float(completed[0]["eval_accuracy"]) == found["best_value"]
    assert found["best_params"].keys() == {"optimizer.lr", "model._target_"}
    capsys.readouterr()
    assert shell(f"{line} sweep.metric=eval_mine") == 2  # the last counts
    assert "sweep.metric=eval_mine: no such metric" in capsys.readouterr().err
    assert shell(f"{line.replace('1e-3,1', '-1,1')}") == 2
    assert any("optimizer.lr=-1" in fault for fault in faults(capsys.readouterr().err))


def test_both_ends_of_every_interval_and_every_choice_are_checked():
    lines = ["optimizer=adamw,sgd,lion", "++optimizer.lr=tag(log,interval(0.001,1))", "++seed=1"]
    assert cover(lines) == [
        ["optimizer=adamw", "++optimizer.lr=0.001", "++seed=1"],
        ["optimizer=sgd", "++optimizer.lr=1.0", "++seed=1"],
        ["optimizer=lion", "++optimizer.lr=0.001", "++seed=1"],
    ]


def test_each_job_has_gpus_of_its_own_and_its_share_of_the_threads(tmp_path):
    def slots(count: int, gpus: str, ranks: int) -> list[dict[str, str]]:
        all_of = Slots(folder=tmp_path, count=count, gpus=gpus.split(), ranks=ranks, cores=16)
        return [all_of.environment(number) for number in range(count)]

    assert [each["CUDA_VISIBLE_DEVICES"] for each in slots(4, "0 1 2 3", 1)] == ["0", "1", "2", "3"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in slots(2, "4 5 6 7", 2)] == ["4,5", "6,7"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in slots(3, "0 1", 1)] == ["0", "1", "0"]
    assert slots(4, "0 1 2 3", 1)[0]["OMP_NUM_THREADS"] == "4"
    assert slots(2, "", 4) == [{"OMP_NUM_THREADS": "2"}] * 2


def test_what_is_not_installed_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("trainer.cli.plugins.iter_modules", lambda _: [])
    typed = "hydra/launcher=joblib"
    assert shell(f"-m {OWN_RUN} seed=1,2 {typed}") == 2
    (fault,) = faults(capsys.readouterr().err)
    assert fault.startswith(f"{typed}: not installed; pip install '.[joblib]'")
    assert not list(Path("outputs").glob("*"))


def statuses() -> list[dict[str, Any]]:
    return [read_json(path) for path in Path().glob("outputs/multirun/*/*/*/status.json")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("joblib", signal.SIGINT),
        nightly("joblib", signal.SIGKILL),
        nightly("submitit_local", signal.SIGTERM),
        nightly("submitit_local", signal.SIGKILL),
        nightly("basic", signal.SIGKILL),
    ],
)
def test_a_sweep_that_is_stopped_saves_and_goes_on_by_the_same_command(launcher, number):
    line = f"-m {OWN_RUN.replace('steps=2', 'steps=100')} seed=1,2,3 hooks=[{TOYS}.Slow]"
    line += f" hydra/launcher={launcher} checkpoint.every=25"
    command = Command.start(Path.cwd(), shlex.split(line))
    command.wait_for("outputs/multirun/*/*/*/metrics.jsonl")
    if launcher == "basic":  # what is killed in its process saves nothing more
        command.wait_for("outputs/multirun/*/*/*/checkpoints/step-*")
    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)  # as a terminal does
    else:
        command.process.send_signal(number)
    assert command.end().code == (-9 if number == signal.SIGKILL else 75)
    until = time.monotonic() + 100  # in which its jobs see it, and save
    while launcher != "basic" and any(each["state"] == "running" for each in statuses()):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert launcher == "basic" or "preempted" in {each["state"] for each in statuses()}
    time.sleep(2)  # in which they leave
    assert any(each["step"] > 0 for each in statuses())
    assert shell(f"{line} resume=auto") == 0
    _, rows = table()
    assert [row["step"] for row in rows] == ["100"] * 3
    assert all(math.isfinite(float(row["eval_loss"])) for row in rows)
