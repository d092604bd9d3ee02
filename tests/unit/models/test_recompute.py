"""Activation checkpointing: less memory, the same gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from tests.lib.nightly import nightly
from tests.lib.tune_support import ConvNet, Encoder, gpt, workload
from trainer.models.recompute import blocks_of, can_recompute, checkpoint_blocks, with_checkpointing
from trainer.plan.memory import Shape
from trainer.tune.predict import Predictor, predict_peak


def gradient(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    work = workload(model)
    work.backward(work.fields(3, 12))
    return [p.grad.clone() for p in model.parameters()]


def test_the_gradient_is_the_same_bit_for_bit_and_a_copy_computes_with_its_own_weights():
    model = Encoder(dropout=0.5)
    plain = gradient(model)
    with with_checkpointing(model) as count:
        recomputed = gradient(model)
    assert count == 2
    assert all(map(torch.equal, plain, recomputed))
    assert all("forward" not in vars(block) for block in model.blocks)
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(map(torch.equal, gradient(twin), plain))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=1, vocab_size=9, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [gpt, nightly(gpt2)])
def test_a_model_that_recomputes_goes_on_with_it_after_its_memory_was_predicted(make):
    model = make()
    work = workload(model)
    plain = Predictor(work, Shape(1, 16))(Shape(4, 16))
    checkpoint_blocks(model)
    for _ in range(2):
        recomputing = Predictor(work, Shape(1, 16), recompute=True)(Shape(4, 16))
        assert predict_peak(work, Shape(4, 16)) == recomputing
    assert recomputing.activations < plain.activations


def test_the_blocks_of_a_model_are_found_and_its_names_stay():
    model = gpt()
    names = list(model.state_dict())
    assert blocks_of(model) == tuple(model.blocks)
    assert checkpoint_blocks(model) == checkpoint_blocks(model) == 2
    assert list(model.state_dict()) == names
    assert not can_recompute(ConvNet())
    assert checkpoint_blocks(ConvNet()) == 0


def test_blocks_with_batch_norm_and_small_lists_beside_a_large_one_are_left_alone():
    stages = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)), nn.Sequential(nn.Conv2d(3, 3, 3))
    )
    assert blocks_of(nn.ModuleDict({"stages": stages})) == (stages[1],)
    sizes = {"layers": 30, "heads": 3}
    lists = {n: nn.ModuleList(nn.Linear(k, k) for _ in range(4)) for n, k in sizes.items()}
    assert blocks_of(nn.ModuleDict(lists)) == tuple(lists["layers"])
