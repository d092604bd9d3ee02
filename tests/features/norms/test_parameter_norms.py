"""`log.parameters=N`: norms of weights, gradients and updates per block, the same on any layout."""

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.run_support import TOYS, go, overrides, state, steps
from tests.reliability.rank_work import on_ranks
from trainer.features.norms.norms import block_of

DOUBLE = f"model._target_={TOYS}.DoubleNet scheduler=constant log.parameters=2"
# SGD by hand: the update is the clipped gradient times the rate.
SGD = "optimizer=sgd optimizer.momentum=0 optimizer.lr=0.5 clip_norm=0.01"
EVERY = "checkpoint.every=1 checkpoint.keep=9"
BLOCKS = ["embed", "norm", "head"]


def norms(entry) -> dict[str, float]:
    return {name: value for name, value in entry.items() if "/" in name}


def test_norms_are_those_by_hand_every_so_many_steps(capsys):
    run = go(f"{DOUBLE} {SGD} {EVERY}").folder
    shown = capsys.readouterr().out
    assert "_norm/" not in shown
    for entry in steps(run):
        found = norms(entry)
        if entry["step"] % 2:
            assert not found
            continue
        before, after = (state(run, entry["step"] - i) for i in (1, 0))
        for block in BLOCKS:
            names = [n for n in after if n.startswith(f"model.{block}.")]
            changes = [before[n] - after[n] for n in names]
            size, update = (
                float(torch.cat([t.flatten() for t in part]).norm())
                for part in ([before[n] for n in names], changes)
            )
            assert found[f"weight_norm/{block}"] == pytest.approx(size, rel=1e-12)
            assert found[f"update_norm/{block}"] == pytest.approx(update, rel=1e-9)
            clipped = 0.5 * 0.01 / (entry["grad_norm"] + 1e-6)
            expected = update / clipped  # before clipping
            assert found[f"gradient_norm/{block}"] == pytest.approx(expected, rel=1e-9)
        squares = sum(found[f"gradient_norm/{block}"] ** 2 for block in BLOCKS)
        assert squares == pytest.approx(entry["grad_norm"] ** 2, rel=1e-12)


@pytest.mark.parametrize(
    ("net", "layout", "tolerance"),
    [
        ("DoubleNet", "parallel=fsdp parallel.ranks=2", 1e-12),
        slow("LowNet accum.buffer=fp32", "parallel=fsdp parallel.ranks=2", 1e-3),
        nightly("DoubleNet", "parallel=hsdp parallel.ranks=4 parallel.shard=2", 1e-12),
    ],
)
def test_ranks_write_the_norms_of_one_process(net, layout, tolerance, ranks):
    line = f"{DOUBLE} steps=2 model._target_={TOYS}.{net}"
    alone = norms(steps(go(line))[1])
    run = on_ranks(ranks, overrides(f"{line} {layout}"))
    assert norms(steps(run)[1]) == pytest.approx(alone, rel=tolerance)
    assert len(alone) == 9
    assert all(value > 0 for value in alone.values())


def test_what_is_beside_blocks_goes_by_its_module():
    names = ["model.layers.1.mlp.weight", "model.layers.10.mlp.weight", "lm_head.weight", "scale"]
    blocks = [block_of(name, ["model.layers.1", "model.layers.10"]) for name in names]
    assert blocks == ["model.layers.1", "model.layers.10", "lm_head", "scale"]
