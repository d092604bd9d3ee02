"""Activation checkpointing: less memory, the same gradient."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=1, vocab_size=9, **ends)
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


class Running(nn.Module):
    """Reads what it writes: a mean in place, a count in a new tensor, draws, and what it saves.

    A table grows with its inputs, up to a number, as rotary positions do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(6, 6), nn.BatchNorm1d(6), 0
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("table", torch.zeros(6), persistent=False)
        self.reach = 0
        self.register_buffer("scale", torch.from_numpy(np.ones(6, "float32")))

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x)) * torch.rand(6, generator=self.generator)
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        # A kernel that writes and leaves the tensors' versions as they were.
        x = x + F.batch_norm(x, self.center, self.scale, training=True) * self.scale.clone()
        self.seen, self.calls = self.seen + 1, self.calls + 1
        if len(x) > self.reach:
            self.reach, self.table = len(x), torch.arange(6.0)
        x = x * self.table
        return torch.relu(x - self.mean * self.seen / self.calls)


class Runs(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.blocks, self.times = nn.ModuleList([Running(), Running()]), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks] * self.times:
            x = block(x)
        return x


def hugging_face_runs() -> nn.Module:
    """Make the same of a model of transformers; its base classes take two seconds to import."""

    class Layer(transformers.modeling_layers.GradientCheckpointingLayer, Running):
        pass

    class HuggingFaceRuns(transformers.PreTrainedModel, Runs):
        config_class, supports_gradient_checkpointing = transformers.PretrainedConfig, True

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig())
            self.blocks, self.times = nn.ModuleList([Layer(), Layer()]), 1

        forward = Runs.forward

    return HuggingFaceRuns()


@pytest.mark.parametrize("make", [Runs, hugging_face_runs])
def test_what_a_forward_writes_is_written_once_and_computed_from_as_it_was(make):
    plain = make()
    again = copy.deepcopy(plain)
    assert checkpoint_blocks(again)
    batches = torch.randn(3, 5, 6)
    for model in (plain, again):
        for batch in batches:
            model(batch).square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for block, other in zip(plain.blocks, again.blocks, strict=True):
        assert all(map(torch.equal, block.buffers(), other.buffers()))
        assert torch.equal(block.generator.get_state(), other.generator.get_state())
        assert block.calls == other.calls == block.seen == 3


def test_a_block_that_runs_twice_is_computed_from_each_of_its_states_again():
    plain = Runs(times=2)
    again = copy.deepcopy(plain)
    checkpoint_blocks(again)
    batch = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(plain)(batch), copy.deepcopy(again)(batch))
    for model in (plain, again):
        model(batch).sum().backward()
    assert all(map(torch.equal, plain.buffers(), again.buffers()))
    gradients = ([p.grad for p in model.parameters()] for model in (plain, again))
    assert all(map(torch.equal, *gradients))
