"""Ranks begin with the same data and model, or not at all; and a model can be laid out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.lib.consistency_work import (
    gradients,
    refused_data,
    refused_models,
    refused_types,
    shared,
)
from tests.lib.nightly import nightly
from tests.lib.support import EXACT
from trainer.build.parallel import rank_memory
from trainer.core.world import World
from trainer.models.recompute import separable_blocks
from trainer.tune.memory_limit import memory_limit

MODELS = {
    "same": "",
    "governed": "",
    "strided": "",
    "on meta": "",
    "ungoverned": "weights differ between ranks",
    "rank": "2.weight of rank 1 is not",
    "buffer": "1.running_mean of rank 1",
    "names": "(own1)",
    "frozen": "(0.weight)",
    "on meta, by rank": "weights differ between ranks",
}
DATA = {
    "same": "",
    "lengths": "DataError: data: rank 1 reads other samples",
    "fingerprint": "DataError: data: rank 1 reads other samples",
}


def test_ranks_whose_models_differ_are_refused_and_the_tensor_is_named(ranks):
    first, second = ranks.run(2, refused_models, list(MODELS))
    assert first == second
    for (how, words), line in zip(MODELS.items(), first, strict=True):
        assert words in line, how
        assert line.startswith("ConfigError: model: ") == bool(words) == bool(line), how
    assert ranks.run(2, refused_models, ["rank"], False) == [[""], [""]], "it is to be loaded"


def test_ranks_that_read_other_samples_are_refused(ranks):
    first, second = ranks.run(2, refused_data, list(DATA))
    assert first == second
    for (how, words), line in zip(DATA.items(), first, strict=True):
        assert line.startswith(words), how
        assert bool(line) == bool(words), how


@pytest.mark.parametrize(
    ("how", "in_lockstep"),
    [
        *(("parameter", False), ("block", True)),
        *(nightly(how, False) for how in ("module", "head", "block")),
        *(nightly(how, True) for how in ("module", "parameter", "head")),
    ],
)
def test_blocks_that_share_parameters_are_sharded_exactly(ranks, how, in_lockstep):
    expected = gradients(World(), how, in_lockstep=False)
    for found in ranks.run(2, gradients, how, in_lockstep):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            difference = np.abs(found[name] - value).max() / np.abs(value).max()
            assert difference <= EXACT[torch.float64], name


@pytest.mark.parametrize(
    ("how", "count"), {"": 3, "module": 1, "parameter": 1, "head": 2, "block": 2}.items()
)
def test_only_blocks_that_share_nothing_are_sharded_on_their_own(how, count):
    assert len(separable_blocks(shared(how))) == count


def test_a_block_of_several_types_is_refused_in_one_line(ranks):
    (first, _) = ranks.run(2, refused_types)
    assert first.startswith("ConfigError: parallel=fsdp: FSDP2 needs one parameter dtype per block")
    assert "blocks.1.gain torch.float32" in first


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_weighs_the_typed_memory_as_its_plan_does(command):
    typed = 60 * 2**20
    config = SimpleNamespace(
        command=command, device="cpu", accum=SimpleNamespace(params={"memory": typed})
    )
    limit, is_here = rank_memory(config, World())
    assert is_here
    assert limit == memory_limit(torch.device("cpu"), asked=typed)
