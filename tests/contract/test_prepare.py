"""What an objective draws for a sample is the same for every cut, worker and resumption."""

from pathlib import Path

import pytest

from tests.lib.run_support import TOYS, curve, go, on, state
from trainer.core.errors import DataError

EXACT = 1e-12
OBJECTIVE = """
import os

import torch

from trainer.objectives.base import Objective, Sums, logits_from


class Hidden(Objective):  # predicts tokens that it hides
    def __init__(self, seeded=True, kept=1.0):
        self.seeded, self.kept = seeded, kept

    def prepare(self, sample):
        ids = sample["input_ids"]
        if not self.seeded:
            torch.manual_seed(int.from_bytes(os.urandom(4)))
        ids = ids[: int(self.kept * len(ids))]
        hides = torch.rand(len(ids)) < 0.5
        labels = ids.masked_fill(~hides, -100)
        return {"input_ids": ids.masked_fill(hides, 0), "labels": labels}

    def weights(self, fields):
        return {"entropy": float((fields["labels"] != -100).sum())}

    def sums(self, model, fields):
        logits, labels = logits_from(model, fields).flatten(0, 1), fields["labels"].flatten()
        cross_entropy = torch.nn.functional.cross_entropy
        return Sums(losses={"entropy": cross_entropy(logits, labels, reduction="sum")})
"""
LINE = f"model._target_={TOYS}.DoubleNet objective._target_=hiding.Hidden seed=5 scheduler=constant"


@pytest.fixture(autouse=True)
def _objective(own_folder: None) -> None:
    Path("hiding.py").write_text(OBJECTIVE)


def test_an_objective_s_draws_are_the_same_for_every_cut_worker_and_resumption():
    """Nine steps pass the end of an epoch, from which on the same samples draw anew."""
    line = f"{LINE} steps=9 eval.every=3"
    run = go(line)
    others = [
        go(f"{line} num_workers=2 accum=budget accum.max_tokens=40"),
        on(go(f"{LINE} steps=4"), "steps=9 accum.micro=2"),
    ]
    for other in others:
        for name in ("loss", "grad_norm"):
            assert curve(other, name) == pytest.approx(curve(run, name), rel=EXACT)
        assert other.result["eval_loss"] == pytest.approx(run.result["eval_loss"], rel=EXACT)
        for name, tensor in state(run).items():
            assert tensor.sub(state(other)[name]).abs().max() <= EXACT * tensor.abs().max(), name
    assert curve(go(f"{LINE} steps=1 objective.seeded=false"), "loss") != curve(run, "loss")[:1]


def test_an_objective_that_changes_the_length_of_a_sample_ends_the_run():
    with pytest.raises(DataError, match=r"sample \d+ of Rows has \d+ tokens, but `lengths`"):
        go(f"{LINE} objective.kept=0.5")
