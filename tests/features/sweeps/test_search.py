"""Searches by Optuna: jobs report while they run, bad ones end early, and a study goes on."""

import csv
import os
import shlex
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.lib.cli_support import CHECKOUT, OWN_RUN, make_own_folder
from tests.lib.nightly import nightly, slow
from tests.lib.processes import Command
from tests.lib.run_support import TOYS, read_json, shell
from trainer.cli.overrides import read_override
from trainer.features.sweeps.search import Search, _distribution, open_study

SEARCH = f"-m {OWN_RUN.replace('steps=2', 'steps=4')} eval.every=1 hydra/sweeper=optuna"
# With this seed jobs have the rates in turn; the larger one makes the loss worse with each step.
RATES = "seed=2 optimizer.lr=1e-3,30.0 hydra/sweeper/sampler=random"
EARLY = "+hydra.sweeper.pruner.n_startup_trials=1"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}")


def rows_of_last() -> list[dict[str, str]]:
    *_, path = sorted(Path().glob("outputs/multirun/*/*/sweep.csv"))
    with path.open() as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["job"]))


@pytest.mark.parametrize(
    "more",
    [
        "",
        slow("parallel.ranks=2"),
        slow("hydra/launcher=joblib hydra.launcher.n_jobs=2"),
        nightly("hydra/launcher=submitit_local hydra.sweeper.n_jobs=2"),
    ],
)
def test_bad_jobs_end_early_and_a_study_in_a_file_goes_on_with_the_next_command(more, capfd):
    storage = "hydra.sweeper.storage=sqlite:///study.db hydra.sweeper.study_name=rates"
    line = f"{SEARCH} {RATES} {EARLY} {storage} {more}"
    # Of jobs at once the first two have none before them to be compared with.
    num_jobs = 4 if "n_jobs" in more else 3
    assert shell(f"{line} hydra.sweeper.n_trials={num_jobs}") == 0
    rows = rows_of_last()
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert {row["state"] for row in rows} == {"completed", "pruned"}
    assert {row["optimizer.lr"] for row in pruned} == {"30.0"}
    assert all(int(row["step"]) < 4 and not row["rank"] for row in pruned)
    folder = Path(pruned[0]["folder"])
    assert read_json(folder / "result.json")["stopped"].startswith("pruned: MedianPruner of")
    assert read_json(folder / "status.json")["state"] == "completed", "it is saved as any other"
    assert list(folder.glob("checkpoints/step-*"))
    found = yaml.safe_load((folder.parent / "optimization_results.yaml").read_text())
    assert found["best_params"] == {"optimizer.lr": 1e-3}
    best = min(float(row["eval_loss"]) for row in rows if row["rank"])
    assert found["best_value"] == best

    if more:
        return
    # A job of a sweep that was killed
    with sqlite3.connect("study.db") as database:
        database.execute("UPDATE trials SET state='RUNNING' WHERE number=2")
    capfd.readouterr()
    assert shell(f"{line} hydra.sweeper.n_trials=4") == 0
    assert len(rows_of_last()) == 2, "one in its place, and one more"
    states = [each.state.name for each in open_study("sqlite:///study.db", "rates").trials]
    assert states[2] == "FAIL"
    assert len(states) == 5
    assert shell(f"{line} hydra.sweeper.n_trials=4") == 0
    assert "study rates has its 4 jobs; a larger hydra.sweeper.n_trials" in capfd.readouterr().out
    assert shell(f"{line} sweep.metric=eval_accuracy") == 2
    assert "study_name=rates: has values of eval_loss, to minimize; type" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, nightly(signal.SIGINT)])
def test_a_search_that_was_ended_goes_on_with_the_job_that_it_was_at(number):
    line = f"{SEARCH.replace('steps=4', 'steps=60')} {RATES} hydra/sweeper/pruner=none"
    line += f" hydra.sweeper.n_trials=3 hooks=[{TOYS}.Slow] checkpoint.every=10"
    command = Command.start(Path.cwd(), shlex.split(line))
    command.wait_for("outputs/multirun/*/*/1/checkpoints/step-*")
    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    assert command.end().code == (-9 if number == signal.SIGKILL else 75)
    (journal,) = Path().glob("outputs/multirun/*/*/study.log")
    assert len(before := open_study(str(journal), journal.parent.name).trials) == 2
    first = (journal.parent / "0" / "result.json").read_bytes()
    assert shell(f"{line} resume=auto") == 0
    after = open_study(str(journal), journal.parent.name).trials
    assert [each.state.name for each in after] == ["COMPLETE"] * 3
    assert [each.params for each in after[:2]] == [each.params for each in before]
    assert (journal.parent / "0" / "result.json").read_bytes() == first
    assert [row["step"] for row in rows_of_last()] == ["60"] * 3


@pytest.mark.parametrize("seed", [None, 7])
def test_jobs_that_begin_at_once_have_other_values(seed, tmp_path):
    settings = {"_target_": "optuna.samplers.RandomSampler", "seed": seed}
    search = Search(
        folder=tmp_path,
        storage=str(tmp_path / "study.log"),
        study="at_once",
        metric="eval_loss",
        mode="min",
        typed=["a=interval(0,1)"],
        sampler=settings,
        pruner={},
        seed=0,
        num_trials=3,
    )
    # A job that has its values, and has not yet written to which sweep it belongs
    open_study(search.storage, search.study).ask()
    drawn = {search.take(0).params["a"], search.take(1).params["a"]}
    alone = replace(search, study="one by one")
    assert drawn == {alone.take(0).params["a"], alone.take(1).params["a"]}, "by their number alone"
    assert len(drawn) == 2


def test_what_is_typed_is_drawn_from_as_its_words_say():
    given = {
        "a=interval(0,1)": "FloatDistribution(high=1.0, log=False, low=0.0, step=None)",
        "a=tag(log,interval(0.1,1))": "FloatDistribution(high=1.0, log=True, low=0.1, step=None)",
        "a=int(interval(1,8))": "IntDistribution(high=8, log=False, low=1, step=1)",
        "a=range(0,10,5)": "IntDistribution(high=5, log=False, low=0, step=5)",
        "a=range(0.5,1.5,0.5)": "FloatDistribution(high=1.0, log=False, low=0.5, step=0.5)",
        "a=shuffle(range(1,3))": "IntDistribution(high=2, log=False, low=1, step=1)",
        "a=x,[1,2]": "CategoricalDistribution(choices=('[1,2]', 'x'))",
    }
    assert {line: str(_distribution(read_override(line))) for line in given} == given
