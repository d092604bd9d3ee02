"""A part with state, defined in a user's folder, is saved, resumed, resharded and logged."""

import sys
from pathlib import Path

import pytest

from tests.lib.run_support import TOYS, curve, entries, go, on, saved, state
from trainer.core.errors import ConfigError, NoCheckpointError

CODE = '''
import torch


class Tally:
    """By its methods alone: a tensor and a number, updated each step, logged."""

    def __init__(self, rate: float = 0.5) -> None:
        self.rate, self.count, self.mean = rate, 0, torch.zeros(3)

    def after_update(self, step: int) -> None:
        self.count += 1
        self.mean.lerp_(torch.full((3,), float(step)), self.rate)

    def state(self) -> dict:
        return {"count": self.count, "mean": self.mean}

    def load(self, state: dict) -> None:
        self.count, self.mean = state["count"], state["mean"]

    def metrics(self) -> dict:
        return {"tally": self.count, "tally_mean": self.mean[0]}


class Ema(Tally):
    """An average of the weights, in shards where those are."""

    def begin(self, module: torch.nn.Module) -> None:
        self.module = module
        self.weights = {n: p.detach().clone() for n, p in module.named_parameters()}

    def after_update(self, step: int) -> None:
        for name, parameter in self.module.named_parameters():
            self.weights[name].lerp_(parameter, 1 - self.rate)

    def state(self) -> dict:
        return {"weights": self.weights}

    def load(self, state: dict) -> None:
        self.weights = state["weights"]

    def metrics(self) -> dict:
        return {}


class Clash(Tally):
    def metrics(self) -> dict:
        return {"replays": 0.0}


class Unsavable(Tally):
    def state(self) -> dict:
        return {"x": [object()]}
'''
PARTS = "'parts=[mine.Tally,{_target_: mine.Ema, rate: 0.75}]' scheduler=constant"
AVERAGE = "parts.mine.Ema.weights.head.weight"
OWN = {"parts.mine.Tally.mean", AVERAGE}


@pytest.fixture(autouse=True)
def own_code(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder, which a run puts on the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("mine.py").write_text(CODE)


def test_parts_go_on_bit_for_bit_and_are_logged():
    straight, part = go(f"{PARTS} steps=6"), go(f"{PARTS} steps=3")
    assert curve(straight, "tally") == [1, 2, 3, 4, 5, 6]
    assert curve(straight, "tally_mean")[:2] == [0.5, 1.25]
    on(part, "steps=6")
    assert curve(part, "tally_mean") == curve(straight, "tally_mean")
    found, expected = state(part), state(straight)
    assert found.keys() >= OWN
    for name in (name for name in expected if not name.startswith("rng.")):
        assert found[name].equal(expected[name]), name
    assert saved(part, "parts.mine.Tally")["count"] == 6
    assert not found[AVERAGE].equal(found["model.head.weight"])


def test_a_part_that_is_added_removed_or_cannot_be_saved_is_one_line():
    run = go("steps=2")
    with pytest.raises(ConfigError, match=r"parts=.*the run has \[\]; to change it, resume_allow"):
        on(run, "steps=3 parts=[mine.Tally]")
    on(run, "steps=3 parts=[mine.Tally] resume_allow=[parts]")
    assert [entry.get("tally") for entry in entries(run) if "loss" in entry] == [None, None, 1]
    on(run, "steps=4 parts=[] resume_allow=[parts]")
    with pytest.raises(ConfigError, match=r"parts: metrics\(\) gives replays, which"):
        go("parts=[mine.Clash]")
    with pytest.raises(
        ConfigError, match=r"parts\.mine\.Unsavable\.x\.0: a checkpoint cannot hold"
    ):
        go("parts=[mine.Unsavable]")
    with pytest.raises(ConfigError, match=r"parts\[0\].*: gives Net, not of class Stateful"):
        go(f"parts=[{TOYS}.Net]")


def test_a_part_of_another_version_is_one_line(monkeypatch):
    run = go("parts=[mine.Tally] steps=2")
    monkeypatch.setattr(sys.modules["mine"].Tally, "version", 2, raising=False)
    with pytest.raises(NoCheckpointError, match=r"mine\.Tally has version 1, .* reads version 2"):
        on(run, "steps=3")
