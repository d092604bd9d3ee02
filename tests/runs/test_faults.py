"""What cannot be is told in one line: the key or the sample, the value, and what to do."""

import html
from pathlib import Path

import pytest
from torch import Tensor

from tests.lib.run_support import entries, go, overrides, shell
from tests.lib.run_toys import Net
from trainer import train
from trainer.core.errors import ConfigError


class Loud(Net):
    """Is so sure that the perplexity is beyond what a float holds."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return 1e4 * super().forward(input_ids)


def test_a_perplexity_that_no_float_holds_is_null():
    run = go(f"model._target_={__name__}.Loud objective.metrics=[perplexity] steps=1 eval.every=1")
    assert entries(run)[-1]["eval_perplexity"] is None
    assert entries(run)[-1]["eval_loss"] > 710


FAULTS = """
import torch
from torch import nn

from tests.lib.run_toys import Net, Rows


class Builds(Net):
    def __init__(self, width=8):
        super().__init__(width)
        table = None
        self.table = table["width"]


class Chains(Net):
    def __init__(self, width=8):
        super().__init__(width)
        try:
            {}["table"]
        except KeyError as error:
            raise ValueError("no table") from error


class Computes(Net):
    def __init__(self, width=8, passes=0):
        super().__init__(width)
        self.odd, self.left = nn.Linear(3, 4), passes

    def forward(self, input_ids):
        self.left -= 1
        if self.left >= 0:
            return super().forward(input_ids)
        wide = input_ids.float()[..., :1]
        return self.odd(wide)


class Reads(Rows):
    def __getitem__(self, i):
        return super().__getitem__(i)["nothing"]


class Watches:
    def on_step(self, entry):
        entry["nothing"]
"""


@pytest.fixture(autouse=True)
def own_faults(own_folder: object) -> None:
    Path("own_faults.py").write_text(FAULTS)


def line_of(text: str) -> int:
    return 1 + next(n for n, line in enumerate(FAULTS.splitlines()) if text in line)


def test_a_fault_in_a_constructor_names_the_users_line_and_what_caused_it():
    with pytest.raises(ConfigError) as caught:
        go("model._target_=own_faults.Builds")
    place = f"(own_faults.py:{line_of('self.table')})"
    assert str(caught.value).startswith("model: own_faults.Builds: TypeError: 'NoneType' object")
    assert str(caught.value).endswith(place)
    with pytest.raises(ConfigError) as caught:
        go("model._target_=own_faults.Chains")
    cause = f"caused by KeyError: 'table' (own_faults.py:{line_of('{}[')})"
    assert str(caught.value).endswith(cause)
    run = go("steps=1").folder
    with pytest.raises(ConfigError):
        train([f"resume={run}", "steps=2", "hooks=[own_faults.Builds]"])
    assert 'self.table = table["width"]' in (run / "errors" / "rank0.txt").read_text()


def test_a_fault_in_a_forward_shows_the_users_line_with_shapes_and_how_to_go_on(capsys):
    line = "model._target_=own_faults.Computes hydra.run.dir=run checkpoint.every=2"
    assert shell(" ".join(overrides(line))) == 1
    err = capsys.readouterr().err
    assert f"line {line_of('return self.odd')}" in err
    assert "  with input_ids (" in err
    assert "the whole traceback shows with HYDRA_FULL_ERROR=1" in err
    assert "train: ended before its first step was done: nothing is saved" in err
    assert not Path("run").exists()
    assert shell(" ".join(overrides(f"{line} model.passes=10"))) == 1
    err = capsys.readouterr().err
    place = f'own_faults.py", line {line_of("return self.odd")}, in forward\n'
    assert f"{place}    return self.odd(wide)\n  with input_ids (" in err
    assert ", wide (" in err
    assert "torch/nn" not in err
    assert "torch/nn" in (trace := Path("run/errors/rank0.txt").read_text())
    assert html.escape(trace.splitlines()[-1]) in Path("run/report.html").read_text()
    assert err.splitlines()[-3:] == [
        "train: ended after step 3; step 2 is saved",
        "train: see run/report.html",
        "train: go on with: train resume=run",
    ]
    typed = ["model.passes=99", "resume_allow=[model.passes]", "trust=[tests,own_faults]"]
    assert train(["resume=run", *typed]).exit_code == 0
    assert not Path("run/errors").exists(), "of the last time that it failed, and it did not"


def test_a_fault_in_data_or_a_hook_names_the_users_line(capsys, monkeypatch):
    line = " ".join(overrides("data._target_=own_faults.Reads hydra.run.dir=run"))
    assert shell(line) == 3
    assert f"(own_faults.py:{line_of('super().__getitem__')})" in capsys.readouterr().err
    assert not Path("run").exists()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert shell(line) == 3
    assert "super().__getitem__(i)" in capsys.readouterr().err
    go("hooks=[own_faults.Watches] steps=1")
    words = f"failed (reported once): KeyError: 'nothing' (own_faults.py:{line_of('entry[')})"
    assert words in capsys.readouterr().out
