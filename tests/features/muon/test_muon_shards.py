"""Muon over shards: the update of every matrix is that of one rank, which holds it whole."""

from typing import Any

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.ranks_work import MODES, POLICIES, VOCABULARY, Arrays, BlockLM, error, plain
from trainer.core.world import World
from trainer.features.muon import orthogonal
from trainer.features.muon.muon import Muon
from trainer.features.muon.orthogonal import HiddenMatrices

IDS = torch.arange(36).view(6, 6) * 5 % VOCABULARY


def trained(world: World, mode: str, sync: str = "deferred", *, is_split: bool = False) -> Arrays:
    """Weights and momenta after three steps on the same samples, however many ranks share them."""
    torch.manual_seed(0)
    module = BlockLM().double()
    for block in module.blocks:
        block.fused_matrices = {"up.weight": (9, 7)}
    model = MODES[mode](module, world)
    optimizer: Any = Muon(lr=0.1, weight_decay=0.1).build(module)
    if is_split:
        HiddenMatrices._of_shards = orthogonal_rows
    for _ in range(3):
        model.begin(POLICIES[sync]())
        with model.micro_batch(is_last=True):
            logits = model.call({"input_ids": IDS[world.rank :: world.size]})
            (logits.logsumexp(-1) + logits[..., 0].sin()).sum().backward()
        used = model.used()
        model.make_room()
        model.reduce(used)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found = {name: plain(p.detach()) for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        if "momentum_buffer" in optimizer.state[p]:
            found[f"momentum of {name}"] = plain(optimizer.state[p]["momentum_buffer"])
    return found


def orthogonal_rows(self: Any, found: Any) -> Any:
    """What a rank would make of its rows alone."""
    for weight, group in found:
        momentum = self._momentum(weight, group)
        scale = 0.2 * max(weight.shape) ** 0.5
        yield orthogonal.orthogonalised(momentum, group["ns_steps"]) * scale


@pytest.mark.parametrize(
    ("size", "mode", "sync"),
    [
        # Of 16 and of 8 rows the last rank has fewer.
        (3, "fsdp", "deferred"),
        slow(2, "fsdp", "immediate"),
        slow(5, "fsdp", "deferred"),
        nightly(4, "hsdp", "deferred"),
    ],
)
def test_matrices_in_shards_move_as_whole_ones(ranks, size, mode, sync):
    (alone,) = ranks.run(1, trained, "ddp")
    assert sum(name.startswith("momentum") for name in alone) == 7
    for found in ranks.run(size, trained, mode, sync):
        assert error(found, alone) <= 1e-12


def test_a_rank_that_orthogonalised_its_rows_would_take_another_step(ranks):
    (alone,) = ranks.run(1, trained, "ddp")
    for found in ranks.run(2, trained_by_rows):
        assert error(found, alone) >= 1e-2


def trained_by_rows(world: World) -> Arrays:
    own = HiddenMatrices._of_shards
    try:
        return trained(world, "fsdp", is_split=True)
    finally:
        HiddenMatrices._of_shards = own
