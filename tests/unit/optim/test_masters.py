"""Weights in half precision whose fp32 copies are stepped; their sums: test_wide_gradients.py."""

import pytest
import torch
from torch import nn

from tests.lib.run_toys import DeepNet
from trainer.features.muon.muon import Muon
from trainer.optim.masters import MasterWeights, masters_of, widen_gradients
from trainer.optim.optimizers import SGD, AdamW, OptimizerSpec, OwnOptimizer

LOW = torch.bfloat16
IDS = torch.arange(12).view(2, 6)


def trained(
    spec: OptimizerSpec, *, is_wide: bool = True, steps: int = 1
) -> tuple[DeepNet, torch.optim.Optimizer]:
    model = DeepNet().to(LOW)
    model.embed.requires_grad_(requires_grad=False)
    if is_wide:
        widen_gradients(model)
    optimizer = spec.build(model)
    for _ in range(steps):
        model(IDS).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return model, optimizer


@pytest.mark.parametrize(
    "spec",
    [
        AdamW(lr=1e-3, groups={"head.*": {"lr": 1e-4}}),
        Muon(lr=1e-3),
        # Which makes its state in its constructor.
        OwnOptimizer.of(torch.optim.Adagrad, {"lr": 1e-3}),
    ],
    ids=["adamw", "muon", "adagrad"],
)
def test_any_optimizer_steps_fp32_copies_and_the_weights_are_those_rounded(spec):
    _, optimizer = trained(spec, steps=3)
    pairs = masters_of(optimizer)
    assert len(pairs) == 6  # and no copy of what is frozen
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert stepped == {id(copy) for _, copy in pairs}
    assert any(not copy.equal(copy.to(LOW).float()) for _, copy in pairs)
    for weight, copy in pairs:
        assert copy.dtype == torch.float32
        assert weight.equal(copy.to(LOW))
        assert all(v.dtype != LOW for v in optimizer.state[copy].values() if torch.is_tensor(v))
    assert not masters_of(trained(spec, is_wide=False)[1])


def test_what_is_written_to_a_weight_between_steps_is_where_the_next_begins():
    model, optimizer = trained(SGD(lr=0.0, momentum=0.0))
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    before = model.head.bias.clone()
    model(IDS).sum().backward()
    optimizer.step()
    assert model.head.weight.eq(0.5).all()
    assert model.head.bias.equal(before)


def test_tied_weights_have_one_copy_and_fp32_weights_none():
    model: nn.Module = DeepNet()
    widen_gradients(model)
    assert not MasterWeights(model).pairs
    model.head.weight = model.embed.weight
    widen_gradients(model.to(LOW))
    assert len(MasterWeights(model).pairs) == 6
