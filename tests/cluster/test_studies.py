"""One study of Optuna in a file, which three commands search at once."""

import shlex
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT, OWN_RUN, make_own_folder
from tests.lib.nightly import LIMIT_S
from tests.lib.processes import Command
from tests.lib.run_support import read_json
from trainer.features.sweeps.search import open_study

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)]


def test_three_commands_search_one_study_and_none_does_the_job_of_another(tmp_path, monkeypatch):
    make_own_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}")
    line = f"-m {OWN_RUN} eval.every=1 hydra/sweeper=optuna hydra/sweeper/sampler=random"
    line += (
        " hydra/sweeper/pruner=none 'optimizer.lr=interval(1e-4, 1e-1)' hydra.sweeper.n_trials=12"
    )
    line += " hydra.sweeper.storage=sqlite:///study.db hydra.sweeper.study_name=rates"
    commands = [Command.start(tmp_path, shlex.split(f"{line} seed={n}")) for n in range(3)]
    ended = [command.end() for command in commands]
    assert [each.code for each in ended] == [0, 0, 0], ended
    trials = open_study("sqlite:///study.db", "rates").trials
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    assert 12 <= len(trials) <= 14, "two others may have begun a last one"
    runs = [*Path().glob("outputs/multirun/*/*/[0-9]*/result.json")]
    assert len(runs) == len(trials)
    losses = sorted(read_json(run)["eval_loss"] for run in runs)
    assert losses == sorted(trial.value for trial in trials)
