"""Ranks begin with the same data and model, or not at all; and a model can be laid out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.consistency_work import gradients, shared, told, told_of_data, told_of_types
from tests.lib.ranks_support import Ranks
from tests.lib.support import EXACT
from trainer.build.parallel import rank_memory
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.models.check import check_unwrapped
from trainer.models.recompute import separable_blocks
from trainer.tune.memory_limit import memory_limit


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()


@pytest.mark.parametrize(
    ("how", "says"),
    {
        "same": "",
        "governed": "",
        "ungoverned": "weights differ between ranks",
        "rank": "weights differ between ranks",
        "names": "(own1)",
        "frozen": "(0.weight)",
        "on meta": "",
        "on meta, by rank": "weights differ between ranks",
    }.items(),
)
def test_ranks_whose_models_differ_are_refused(ranks, how, says):
    first, second = ranks.run(2, told, how)
    assert first == second
    assert bool(first) == bool(says)
    assert says in first
    assert not first or first.startswith("ConfigError: model: ")


def test_the_tensor_that_differs_is_named_unless_it_is_to_be_loaded(ranks):
    assert "2.weight of rank 1 is not" in ranks.run(2, told, "rank")[0]
    assert "1.running_mean of rank 1" in ranks.run(2, told, "buffer")[0]
    assert ranks.run(2, told, "rank", False) == ["", ""]


@pytest.mark.parametrize("how", ["same", "lengths", "fingerprint"])
def test_ranks_that_read_other_samples_are_refused(ranks, how):
    first, second = ranks.run(2, told_of_data, how)
    assert first == second
    assert first.startswith("DataError: data: rank 1 reads other samples") == (how != "same")


def test_a_rank_that_cannot_read_a_sample_says_which_and_why(ranks):
    first, second = ranks.run(2, told_of_data, "unreadable")
    assert first == second
    says = "DataError: data: rank 1 cannot read sample 1 of Unreadable: OSError: the disk is broken"
    assert first.startswith(says)


@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("how", ["module", "parameter", "head", "block"])
def test_blocks_that_share_parameters_are_sharded_exactly(ranks, how, in_lockstep):
    expected = gradients(World(), how, in_lockstep=False)
    for told_gradients in ranks.run(2, gradients, how, in_lockstep):
        assert told_gradients.keys() == expected.keys()
        for name, value in expected.items():
            difference = np.abs(told_gradients[name] - value).max() / np.abs(value).max()
            assert difference <= EXACT[torch.float64], name


@pytest.mark.parametrize(
    ("how", "kept"), {"": 3, "module": 1, "parameter": 1, "head": 2, "block": 2}.items()
)
def test_only_blocks_that_share_nothing_are_sharded_on_their_own(how, kept):
    assert len(separable_blocks(shared(how))) == kept


def test_a_block_of_several_types_is_refused_in_one_line(ranks):
    (first, _) = ranks.run(2, told_of_types)
    assert first.startswith("ConfigError: parallel=fsdp: FSDP2 shards one type")
    assert "blocks.1.gain torch.float32" in first


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.DataParallel(nn.Linear(2, 2))


def test_a_model_that_is_spread_already_or_unfinished_is_refused():
    for model, says in (
        (nn.DataParallel(nn.Linear(2, 2)), "holds a DataParallel: "),
        (Wrapped(), "holds a DataParallel at inner: "),
        (nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_unwrapped(model)
    whole = nn.Linear(2, 2)
    assert check_unwrapped(whole) is whole


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_weighs_the_typed_memory_as_its_plan_does(command):
    typed = 60 * 2**20
    config = SimpleNamespace(
        command=command, device="cpu", accum=SimpleNamespace(params={"memory": typed})
    )
    limit, is_here = rank_memory(config, World())
    assert is_here
    assert limit == memory_limit(torch.device("cpu"), asked=typed)
