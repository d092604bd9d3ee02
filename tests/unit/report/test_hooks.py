"""Hooks: what they are called with, what they may read and what becomes of what they return."""

import random

import pytest
import torch
from torch import nn

from trainer.report.hooks import Hooks


class Reads:
    """Reads weights, draws numbers, and gives figures."""

    def on_step(self, values, model):
        torch.rand(3), random.random()
        return {"width": model.weight.shape[0], "norm": model.weight.norm()}

    def on_eval(self, values):
        return {"bleu": 3, "eval_loss": 1.0, "text": "x"}

    def on_checkpoint(self, values):
        return {"late": 1}


def test_figures_are_taken_names_of_others_are_not_and_random_draws_stay_as_they_were():
    warnings, model = [], nn.Linear(2, 4)
    hooks = Hooks({"mine": Reads(), "again": Reads()}, warnings.append, model)
    state, other = torch.get_rng_state(), random.getstate()
    found = hooks.call("on_step", {"step": 1, "loss": 2.0})
    assert found == {"width": 4, "norm": pytest.approx(float(model.weight.detach().norm()))}
    assert isinstance(found["norm"], float)
    assert state.equal(torch.get_rng_state())
    assert other == random.getstate()
    (warning,) = warnings
    assert warning.startswith("hook again.on_step returned width, norm: left out (reported once)")
    for _ in range(2):
        assert hooks.call("on_eval", {"step": 1, "eval_loss": 2.0}) == {"bleu": 3}
        assert hooks.call("on_checkpoint", {"step": 1}) == {}
    assert sum("mine.on_eval returned text, eval_loss" in each for each in warnings) == 1
    assert sum("mine.on_checkpoint returned late" in each for each in warnings) == 1
