"""Gradients of bf16 weights added up and reduced in fp32, in every layout and policy."""

from typing import Any

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.ranks_work import MODES, POLICIES, VOCABULARY, Arrays, BlockLM, error, plain
from trainer.core.tensors import is_sharded
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.optim.masters import masters_of, widen_gradients
from trainer.optim.optimizers import SGD

MICRO_BATCHES = 64


def loss_of(call: Any, index: int, rank: int) -> torch.Tensor:
    ids = (torch.arange(12).view(2, 6) * (index + 1) + 7 * rank) % VOCABULARY
    return call({"input_ids": ids}).float().logsumexp(-1).sum()


def low() -> BlockLM:
    torch.manual_seed(0)
    return BlockLM().bfloat16()


def step(world: World, mode: str, sync: str, is_wide: bool) -> tuple[Arrays, Arrays, list[bool]]:
    """The gradient of a step and, in float64, what its micro-batches give alone; the update."""
    module, alone = low(), low()
    if is_wide:
        widen_gradients(module)
    model = MODES[mode](module, world)
    optimizer = SGD(lr=2.0**-3, momentum=0.0).build(module)
    before = [copy.detach().clone() for _, copy in masters_of(optimizer)]
    model.begin(POLICIES[sync]())
    for index in range(MICRO_BATCHES):
        with model.micro_batch(is_last=index == MICRO_BATCHES - 1):
            loss_of(model.call, index, world.rank).backward()
    used = model.used()
    model.make_room()
    model.reduce(used)
    found = {name: plain(p.grad.float()) for name, p in module.named_parameters()}
    gradients = [weight.grad.clone() for weight, _ in masters_of(optimizer)]
    optimizer.step()
    expected = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in alone.named_parameters()}
    for rank in range(world.size):
        for index in range(MICRO_BATCHES):
            grads = torch.autograd.grad(loss_of(bind(alone), index, rank), [*alone.parameters()])
            for total, grad in zip(expected.values(), grads, strict=True):
                total.add_(grad)
    steps = zip(masters_of(optimizer), before, gradients, strict=True)
    right = [
        plain(copy.detach()).tolist() == plain(start - 2.0**-3 * grad).tolist()
        and plain(weight.detach().float()).tolist()
        == plain(copy.detach().bfloat16().float()).tolist()
        and is_sharded(weight) is is_sharded(copy) is (mode in {"fsdp", "hsdp"})
        for (weight, copy), start, grad in steps
    ]
    return found, {name: plain(total) for name, total in expected.items()}, right


CASES = [
    slow(2, "ddp", "deferred"),
    slow(2, "ddp", "overlapped"),
    nightly(2, "ddp", "immediate"),
    slow(2, "fsdp", "deferred"),
    (2, "fsdp", "immediate"),
    nightly(4, "hsdp", "deferred"),
    nightly(4, "hsdp", "hierarchical"),
    (2, "ordered", "deferred"),
]


@pytest.mark.parametrize(("size", "mode", "sync"), CASES)
def test_gradients_of_bf16_weights_are_exact_in_fp32_and_their_copies_are_stepped(
    ranks, size, mode, sync
):
    for found, expected, right in ranks.run(size, step, mode, sync, True):
        assert error(found, expected) <= 1e-6
        assert right == [True] * len(expected)


@pytest.mark.parametrize("mode", ["fsdp", slow("ddp")])
def test_gradients_in_bf16_lose_bits(ranks, mode):
    for found, expected, right in ranks.run(2, step, mode, "deferred", False):
        assert error(found, expected) >= 1e-3
        assert not right
