"""Weights in half precision: sums of many gradients, small updates, copies that are stepped."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from trainer.core.world import World
from trainer.models.bind import bind
from trainer.optim.masters import MasterWeights, masters_of, widen_gradients
from trainer.optim.muon import Muon
from trainer.optim.optimizers import SGD, AdamW, OptimizerSpec, OwnOptimizer
from trainer.parallel.base import Replicated

MICRO_BATCHES = 256
LOW = torch.bfloat16


class Squares(nn.Module):
    """A hidden matrix, an output layer, one frozen; from a seed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fixed = nn.Linear(6, 6, bias=False).requires_grad_(requires_grad=False)
        self.hidden, self.out = nn.Linear(6, 6), nn.Linear(6, 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.fixed(x))))


def inputs(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 6, generator=generator).to(LOW).to(dtype) for _ in range(count)]


def error_of_sum(*, is_wide: bool) -> float:
    """The relative error of a step's gradient, against the same micro-batches' in float64."""
    model = Squares(LOW)
    if is_wide:
        widen_gradients(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    layout = Replicated(model, bind(model), trained, World())
    layout.begin(layout._sync)
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
    for index, x in enumerate(inputs(MICRO_BATCHES, LOW)):
        alone = torch.autograd.grad(model(x).float().square().sum(), trained)
        for total, part in zip(expected, alone, strict=True):
            total.add_(part)
        with layout.micro_batch(is_last=index == MICRO_BATCHES - 1):
            layout.call({"x": x}).float().square().sum().backward()
    layout.reduce(layout.used())
    found = torch.cat([p.grad.double().flatten() for p in trained])
    whole = torch.cat([total.flatten() for total in expected])
    return float((found - whole).norm() / whole.norm())


def test_many_gradients_in_bf16_are_added_up_exactly_in_fp32_and_not_in_bf16():
    assert error_of_sum(is_wide=True) <= 1e-6
    assert error_of_sum(is_wide=False) >= 1e-3


def trained(
    dtype: torch.dtype, spec: OptimizerSpec, *, is_wide: bool = False, steps: int = 300
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Learn to give ones, by small updates."""
    model = Squares(dtype)
    if is_wide:
        widen_gradients(model)
    optimizer = spec.build(model)
    for x in inputs(steps, dtype):
        (model(x) - 1).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return model, optimizer


def loss_of(model: nn.Module) -> float:
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return float(sum((model(x) - 1).float().square().mean() for x in inputs(20, dtype)) / 20)


def test_copies_learn_by_updates_that_weights_in_bf16_lose():
    spec = AdamW(lr=2e-4)
    begun, whole = loss_of(Squares(torch.float32)), loss_of(trained(torch.float32, spec)[0])
    copied, plain = loss_of(trained(LOW, spec, is_wide=True)[0]), loss_of(trained(LOW, spec)[0])
    assert begun - whole > 0.02
    assert begun - copied == pytest.approx(begun - whole, rel=0.05)
    assert begun - plain < 0.7 * (begun - whole)


SPECS: dict[str, Callable[[], OptimizerSpec]] = {
    "adamw": lambda: AdamW(lr=1e-3, groups={"out.*": {"lr": 1e-4}}),
    "sgd": lambda: SGD(lr=1e-3),
    "muon": lambda: Muon(lr=1e-3),
    # Which makes its state in its constructor.
    "adagrad": lambda: OwnOptimizer.of(torch.optim.Adagrad, {"lr": 1e-3}),
}


@pytest.mark.parametrize("name", SPECS)
def test_any_optimizer_steps_fp32_copies_and_the_weights_are_those_rounded(name):
    _, optimizer = trained(LOW, SPECS[name](), is_wide=True, steps=3)
    pairs = masters_of(optimizer)
    assert len(pairs) == 4  # and no copy of what is frozen
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert stepped == {id(copy) for _, copy in pairs}
    assert any(not copy.equal(copy.to(LOW).float()) for _, copy in pairs)
    for weight, copy in pairs:
        assert copy.dtype == torch.float32
        assert weight.equal(copy.to(LOW))
        assert all(v.dtype != LOW for v in optimizer.state[copy].values() if torch.is_tensor(v))
    assert not masters_of(trained(LOW, SPECS[name](), steps=1)[1])


def test_what_is_written_to_a_weight_between_steps_is_where_the_next_begins():
    model, optimizer = trained(LOW, SGD(lr=0.0, momentum=0.0), is_wide=True, steps=1)
    with torch.no_grad():
        model.hidden.weight.fill_(0.5)
    before = model.out.weight.clone()
    model(inputs(1, LOW)[0]).sum().backward()
    optimizer.step()
    assert model.hidden.weight.eq(0.5).all()
    assert model.out.weight.equal(before)


def test_tied_weights_have_one_copy_and_fp32_weights_none():
    model = Squares(LOW)
    model.out.weight = model.hidden.weight
    widen_gradients(model)
    copies: Sequence[object] = MasterWeights(model).pairs
    assert len(copies) == 3
    whole = Squares(torch.float32)
    widen_gradients(whole)
    assert not MasterWeights(whole).pairs
