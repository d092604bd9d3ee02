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
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 2))
        model.train()
        return {"width": model[0].weight.shape[0], "norm": model[0].weight.norm()}

    def on_eval(self, values):
        return {"bleu": 3, "eval_loss": 1.0, "text": "x"}

    def on_checkpoint(self, values):
        values.clear()
        return {"late": 1}


class Fails:
    def on_step(self, values):
        raise RuntimeError("its own fault")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))


def test_figures_are_taken_names_of_others_are_not_and_random_draws_stay_as_they_were(model):
    warnings = []
    hooks = Hooks({"mine": Reads(), "again": Reads()}, warnings.append, model)
    state, other = torch.get_rng_state(), random.getstate()
    found = hooks.call("on_step", {"step": 1, "loss": 2.0})
    assert found == {"width": 4, "norm": pytest.approx(float(model[0].weight.detach().norm()))}
    assert isinstance(found["norm"], float)
    assert state.equal(torch.get_rng_state())
    assert other == random.getstate()
    (warning,) = warnings
    assert warning.startswith("hook again.on_step returned width, norm: left out (reported once)")
    evaluation = {"step": 1, "eval_loss": 2.0}
    for _ in range(2):
        assert hooks.call("on_eval", evaluation) == {"bleu": 3}
        assert hooks.call("on_checkpoint", {"step": 1}) == {}
    assert sum("mine.on_eval returned text, eval_loss" in each for each in warnings) == 1
    assert sum("mine.on_checkpoint returned late" in each for each in warnings) == 1


def test_a_hook_that_fails_is_reported_once(model):
    warnings = []
    hooks = Hooks({"mine": Fails()}, warnings.append, model)
    assert hooks.call("on_step", {"step": 1}) == hooks.call("on_step", {"step": 2}) == {}
    (warning,) = warnings
    assert warning.startswith("hook mine.on_step failed (reported once): RuntimeError: its own")
