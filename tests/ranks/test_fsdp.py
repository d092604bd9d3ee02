"""Sharded models: they start in less memory than they have, and need what was predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.lib.nightly import nightly
from tests.lib.sharded_work import (
    MODELS,
    Load,
    begun,
    both,
    peak_at_start,
    trained,
    workload,
)
from tests.lib.support import EXACT
from trainer.core.world import World
from trainer.models.meta_start import build_on_meta, drawn
from trainer.plan.cut import Layout
from trainer.plan.cuts import Auto
from trainer.plan.memory import Shape
from trainer.tune.memory_limit import MemoryLimit
from trainer.tune.predict import predict_peak
from trainer.tune.tuner import tune
from trainer.tune.tuning import Question

TOLERANCE = 0.05
"""What the prediction of tensor bytes may be off."""


LOADS = [
    (4, Load("deferred", replicas=2, tied=True)),
    nightly(3, Load("deferred", width=16, micro=10)),
    nightly(2, Load("immediate", recompute=True)),
    nightly(2, Load("deferred")),
    nightly(2, Load("immediate")),
    nightly(4, Load("hierarchical", replicas=2)),
]


@pytest.mark.parametrize(("size", "load"), LOADS, ids=str)
def test_the_predicted_peak_of_a_rank_is_the_measured_one(ranks, size, load):
    for measured, predicted in ranks.run(size, both, load):
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=TOLERANCE)


def test_the_parts_of_a_prediction_are_shards_and_what_a_window_gathers(ranks):
    window, lockstep = (ranks.run(2, both, Load(sync))[0][1] for sync in ("deferred", "immediate"))
    shard = lockstep.parameters  # padded: 17 rows of the embedding are nine and eight
    assert window.parameters == pytest.approx(3 * shard, rel=0.01)
    assert window.gradients == pytest.approx(2 * shard, rel=0.01)
    assert window.optimizer_state == lockstep.optimizer_state == pytest.approx(2 * shard, rel=0.01)
    assert lockstep.peak_bytes < window.peak_bytes


@pytest.mark.nightly
def test_recomputing_is_weighed_by_what_a_rank_with_shards_needs():
    work, single = workload(Load("deferred", width=16), size=2), Shape(1, 24)
    plain, recomputed = (
        predict_peak(work, single, recompute=recompute).peak_bytes for recompute in (False, True)
    )
    assert recomputed < plain
    asked = Question(
        work=work,
        batches=[np.full(8, 24)],
        most_samples=8,
        longest=24,
        shortest=24,
        cut_at=Auto().tuned,
        layout=Layout(world_size=2),
        limit=MemoryLimit(bytes=(plain + recomputed) // 2, source="a simulated budget"),
        recompute="auto",
        timed=False,
    )
    assert tune(asked, clock=lambda: 0.0).activation_checkpointing
    plenty = replace(asked, limit=MemoryLimit(bytes=10**9, source="a simulated budget"))
    assert not tune(plenty, clock=lambda: 0.0).activation_checkpointing


@pytest.mark.parametrize("name", ["gpt_tiny", nightly("like gpt2")])
def test_a_sharded_model_begins_with_the_very_weights_of_one_rank(ranks, name):
    for answer in ranks.run(3, begun, name):
        assert all(answer.values()), [key for key, same in answer.items() if not same]


def test_a_model_larger_than_the_memory_of_a_rank_can_start(ranks):
    for peak, largest, whole in ranks.run(4, peak_at_start, True):
        # Shards, and one weight with its shard.
        assert whole / 4 < peak < whole / 4 + 3 * largest < whole / 2
    for peak, _, whole in ranks.run(2, peak_at_start, False):
        assert peak >= whole


@pytest.mark.parametrize("sync", ["deferred", nightly("immediate")])
def test_a_model_that_was_never_whole_trains_as_on_one_rank(ranks, sync):
    losses, weights = trained(World(), "deferred")
    for mine, theirs in ranks.run(3, trained, sync):
        assert mine == pytest.approx(losses, rel=1e-12)
        for name, expected in weights.items():
            difference = abs(theirs[name] - expected).max() / abs(expected).max()
            assert difference <= EXACT[torch.float64], name


def test_a_model_on_meta_can_be_whole_for_a_while():
    torch.manual_seed(3)
    expected = MODELS["like gpt2"]()
    torch.manual_seed(3)
    module, weights = build_on_meta(MODELS["like gpt2"])
    before = dict(module.named_parameters())
    with drawn(module, weights, torch.device("cpu")):
        for (name, mine), theirs in zip(
            module.named_parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name
            assert mine.requires_grad == theirs.requires_grad
    assert all(p.is_meta and p is before[name] for name, p in module.named_parameters())
