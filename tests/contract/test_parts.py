"""A part with state, defined in a user's folder, is saved, resumed and logged."""

from pathlib import Path

import pytest

from tests.lib.run_support import TOYS, curve, entries, go, on, saved, state
from trainer.core.errors import ConfigError

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


class Clash(Tally):
    def metrics(self) -> dict:
        return {"replays": 0.0}


class Unsavable(Tally):
    def state(self) -> dict:
        return {"x": [object()]}
'''


@pytest.fixture(autouse=True)
def _own_code(own_folder: None) -> None:
    Path("mine.py").write_text(CODE)


def test_parts_go_on_bit_for_bit_and_are_logged():
    line = "'parts=[{_target_: mine.Tally, rate: 0.5}]' scheduler=constant"
    straight, part = go(f"{line} steps=6"), go(f"{line} steps=3")
    assert curve(straight, "tally") == [1, 2, 3, 4, 5, 6]
    assert curve(straight, "tally_mean")[:2] == [0.5, 1.25]
    on(part, "steps=6")
    assert curve(part, "tally_mean") == curve(straight, "tally_mean")
    found, expected = state(part), state(straight)
    assert "parts.mine.Tally.mean" in expected
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name
    assert saved(part, "parts.mine.Tally")["count"] == 6


def test_a_part_that_is_added_removed_or_cannot_be_saved_is_one_line():
    run = go("steps=2")
    with pytest.raises(ConfigError, match=r"parts=.*the run has \[\]; to change it, resume_allow"):
        on(run, "steps=3 parts=[mine.Tally]")
    on(run, "steps=3 parts=[mine.Tally] resume_allow=[parts]")
    assert [entry.get("tally") for entry in entries(run) if "loss" in entry] == [None, None, 1]
    on(run, "steps=4 parts=[] resume_allow=[parts]")
    for target, words in {
        "mine.Clash": r"parts: metrics\(\) gives replays, which",
        "mine.Unsavable": r"parts\.mine\.Unsavable\.x\.0: a checkpoint cannot hold",
        f"{TOYS}.Net": r"parts\[0\].*: gives Net, not of class Stateful",
    }.items():
        with pytest.raises(ConfigError, match=words):
            go(f"parts=[{target}]")
