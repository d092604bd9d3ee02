"""Gradients of bf16 weights added up and reduced in fp32, in every layout and policy."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.ranks_work import MODES, POLICIES, VOCABULARY, Arrays, BlockLM, error, plain, sharded
from trainer.core.tensors import is_sharded
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.optim.masters import masters_of, widen_gradients
from trainer.optim.optimizers import SGD

MICRO_BATCHES = 64
LOW = torch.bfloat16
LAYOUTS = {**MODES, "gathered": partial(sharded, dtype=LOW)}
"""The last has weights in fp32, which are gathered in bf16."""


def loss_of(call: Any, index: int, rank: int) -> torch.Tensor:
    ids = (torch.arange(12).view(2, 6) * (index + 1) + 7 * rank) % VOCABULARY
    return call({"input_ids": ids}).float().logsumexp(-1).sum()


def model_of(dtype: torch.dtype) -> BlockLM:
    torch.manual_seed(0)
    return BlockLM().to(dtype)


def step(world: World, mode: str, sync: str) -> tuple[Arrays, Arrays, Arrays, list[bool]]:
    """The gradient of a step; what its micro-batches give alone, in fp64 and bf16; the update."""
    module, alone = model_of(torch.float32 if mode == "gathered" else LOW), model_of(LOW)
    if mode != "gathered":
        widen_gradients(module)
    model = LAYOUTS[mode](module, world)
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
    sums = {
        dtype: {n: torch.zeros_like(p, dtype=dtype) for n, p in alone.named_parameters()}
        for dtype in (torch.float64, LOW)
    }
    for rank in range(world.size):
        for index in range(MICRO_BATCHES):
            grads = torch.autograd.grad(loss_of(bind(alone), index, rank), [*alone.parameters()])
            for totals in sums.values():
                for total, grad in zip(totals.values(), grads, strict=True):
                    total.add_(grad)
    expected, lossy = ({n: plain(t.double()) for n, t in each.items()} for each in sums.values())
    steps = zip(masters_of(optimizer), before, gradients, strict=True)
    right = [
        plain(copy.detach()).tolist() == plain(start - 2.0**-3 * grad).tolist()
        and plain(weight.detach().float()).tolist()
        == plain(copy.detach().bfloat16().float()).tolist()
        and is_sharded(weight) is is_sharded(copy) is (mode in {"fsdp", "hsdp"})
        for (weight, copy), start, grad in steps
    ]
    return found, expected, lossy, right


CASES = [
    slow(2, "ddp", "deferred"),
    slow(2, "ddp", "overlapped"),
    slow(2, "fsdp", "immediate"),
    nightly(4, "hsdp", "hierarchical"),
    (2, "ordered", "deferred"),
    (2, "gathered", "deferred"),
    slow(2, "gathered", "immediate"),
]


@pytest.mark.parametrize(("size", "mode", "sync"), CASES)
def test_gradients_of_bf16_weights_are_exact_in_fp32_and_their_copies_are_stepped(
    ranks, size, mode, sync
):
    for found, expected, lossy, right in ranks.run(size, step, mode, sync):
        assert error(found, expected) <= 1e-6
        assert error(lossy, expected) >= 1e-3
        assert right == [True] * (0 if mode == "gathered" else len(expected))
