"""Bias corrections divide by one minus the product of all betas, however those change."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.reliability.support import parts_of, put
from trainer.checkpoint.state import capture, restore
from trainer.checkpoint.store import CheckpointStore
from trainer.core.errors import ConfigError
from trainer.optim.bias_correction import step_factor
from trainer.optim.optimizers import AdamW, HalfLives, OwnOptimizer

LR, EPS, BETAS = 0.01, 1e-10, (0.9, 0.999)
SIZES = [256] * 5 + [16] * 6 + [1000] * 3 + [64] * 4


class OwnAdam(torch.optim.Optimizer):
    """A user's own, which counts steps in whole numbers."""

    def __init__(self, params: object, lr: float, betas: tuple[float, float] = BETAS) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, (b1, b2) = self.state[p], group["betas"]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].lerp_(p.grad**2, 1 - b2)
                mean, square = state["m"] / (1 - b1 ** state["step"]), state["v"]
                p.sub_(group["lr"] * mean / ((square / (1 - b2 ** state["step"])).sqrt() + EPS))


def in_a_plain_loop(grads: list[Tensor]) -> Tensor:
    """Take all steps by the definition: divisors are one minus products of betas."""
    weight, mean, second = (torch.zeros_like(grads[0]) for _ in range(3))
    product1 = product2 = 1.0
    for size, grad in zip(SIZES, grads, strict=True):
        b1, b2 = (beta ** (size / 64) for beta in BETAS)
        product1, product2 = product1 * b1, product2 * b2
        mean = b1 * mean + (1 - b1) * grad
        second = b2 * second + (1 - b2) * grad**2
        root = (second / (1 - product2)).sqrt() + EPS
        weight = weight - LR * mean / (1 - product1) / root
    return weight


@pytest.mark.parametrize(
    "spec",
    [AdamW(lr=LR, betas=BETAS, eps=EPS), OwnOptimizer.of(OwnAdam, {"lr": LR})],
    ids=["adamw", "own"],
)
def test_betas_that_follow_the_batch_give_the_update_of_a_plain_loop(spec):
    """Of random gradients; the control counts steps as if betas had always been those of now."""
    torch.manual_seed(0)
    grads = [torch.randn(3, dtype=torch.float64) for _ in SIZES]
    expected, found = in_a_plain_loop(grads), []
    for follows in (True, False):
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=torch.float64))})
        optimizer = spec.build(model)
        follow = HalfLives(spec=spec, optimizer=optimizer, reference_batch=64, decays=(0.0,))
        for size, grad in zip(SIZES, grads, strict=True):
            counts = [state["step"] for state in optimizer.state.values()]
            follow(size, 1.0)
            if not follows:
                for state, count in zip(optimizer.state.values(), counts, strict=True):
                    state["step"] = count
            model["w"].grad = grad.clone()
            optimizer.step()
        found.append(model["w"].detach())
    assert torch.allclose(found[0], expected, rtol=1e-6, atol=0)
    assert not torch.allclose(found[1], expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("steps", "before", "after", "factor"),
    [
        (7, (0.9, 0.999), (0.81, 0.999**2), 0.5),
        (7, (0.0, 0.999), (0.0, 0.999**2), 0.5),
        (5000, (0.9, 0.95), (0.9, 0.999), math.log(0.95) / math.log(0.999)),  # both are at zero
        (2000, (0.9, 0.999), (0.9, 0.99), math.log(0.999) / math.log(0.99)),  # the first is
        (0, (0.9, 0.95), (0.9, 0.95), 1.0),
    ],
)
def test_one_count_of_steps_suits_all_betas_or_none_does(steps, before, after, factor):
    assert step_factor(steps, before, after) == pytest.approx(factor, rel=1e-9)
    with pytest.raises(ConfigError, match=r"after 7 steps with .* no bias correction is right"):
        step_factor(7, (0.9, 0.95), (0.9, 0.999))


def test_a_resumed_run_with_other_betas_keeps_its_corrections_or_is_refused(tmp_path):
    """With equal gradients each update of Adam is the learning rate, whatever its betas."""

    def step(optimizer: torch.optim.Optimizer) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=torch.float64))})
    weight = model["w"]
    optimizer = AdamW(lr=LR, betas=BETAS).build(model)
    for _ in range(6):
        step(optimizer)
    store, before = CheckpointStore(tmp_path), weight.detach().clone()
    put(store, 6, *capture(parts_of(model, optimizer)))
    loaded = store.load()
    powers = (0.9**0.25, 0.999**0.25)
    other = AdamW(lr=LR, betas=powers).build(model)
    restore(loaded, parts_of(model, other, keeps_settings=True))
    step(other)
    assert torch.allclose(before - weight, torch.full_like(weight, LR), rtol=1e-6)
    third = AdamW(lr=LR, betas=(0.9, 0.95)).build(model)
    with pytest.raises(ConfigError, match=r"^optimizer\.betas=\[0\.9,0\.95\]: after 6 steps"):
        restore(loaded, parts_of(model, third, keeps_settings=True))
