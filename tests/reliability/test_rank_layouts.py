"""Harness 10: a run over several ranks may change how it is laid out, and no step does."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.lib.nightly import nightly, slow
from tests.reliability import lab
from tests.reliability.rank_work import run_as_rank
from trainer.checkpoint.store import CheckpointStore
from trainer.core.world import World

SIX = (
    *("model._target_=tests.reliability.rank_toys.Net", "+model.double=true"),
    *("steps=6", "checkpoint.every=null", "accum.micro=2"),
)
EXACT = 1e-12


def weights(folder: Path) -> dict[str, Any]:
    loaded = CheckpointStore(folder / "checkpoints").load(set_aside=False)
    return {n: t[...] for n, t in loaded.tensors.items() if not n.startswith("rng.")}


def assert_close(found: Path, expected: Path, about: str) -> None:
    """The same samples and tokens behind every step, and state that differs by rounding alone."""
    mine, theirs = lab.logged(found), lab.logged(expected)
    assert mine["ledger"] == theirs["ledger"], about
    for key in ("step", "tokens", "samples", "epoch", "lr"):
        assert [e.get(key) for e in mine["metrics"]] == [e.get(key) for e in theirs["metrics"]], (
            about
        )
    for key in ("loss", "grad_norm", "eval_loss"):
        values = [[e[key] for e in log["metrics"] if key in e] for log in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-10), f"{about}: {key}"
    saved, reference = weights(found), weights(expected)
    assert saved.keys() == reference.keys(), about
    for name, tensor in reference.items():
        if not name.endswith("calls"):
            error = (saved[name].double() - tensor.double()).norm()
            assert error <= EXACT * (tensor.double().norm() + 1e-30), f"{about}: {name}: {error}"


# Without Adafactor and Rprop, which PyTorch does not step in shards.
OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "layer decay": ("optimizer.layer_decay=0.5",),
    "sgd": ("optimizer=sgd", "optimizer.lr=0.05"),
    "sgd without momentum": ("optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0"),
    "AMSGrad": ("optimizer=adam", "optimizer.lr=0.01", "optimizer.amsgrad=true"),
    "centered RMSprop": ("optimizer=rmsprop", "optimizer.momentum=0.9", "optimizer.centered=true"),
    **{
        name: (f"optimizer={name}", "optimizer.lr=0.01")
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam")
    },
}
MODES = ("none", "ddp", "fsdp", "hsdp")
CYCLE = [("none", "fsdp"), ("fsdp", "ddp"), ("ddp", "hsdp"), ("hsdp", "none")]
"""Each mode is left once, and gone on in once."""


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        slow("layer decay", [("none", "fsdp")]),
        nightly("adamw", [*product(MODES, repeat=2)]),
        *(nightly(name, CYCLE) for name in OPTIMIZERS if name != "adamw"),
    ],
    ids=str,
)
def test_an_optimizer_goes_on_under_another_mode(name, pairs, ranks, tmp_path):
    """Stopped after three steps under one mode, and ended under another, on two ranks."""

    def end(folder: Path, mode: str, code: int, **how: Any) -> None:
        given = (*SIX, *OPTIMIZERS[name], f"parallel={mode}"), folder, how
        is_alone = mode == "none"
        ended = [run_as_rank(World(), *given)] if is_alone else ranks.run(2, run_as_rank, *given)
        assert {each["code"] for each in ended} == {code}, (name, folder.name, ended)

    end(tmp_path / "undisturbed", "none", 0)
    for first, then in pairs:
        folder = tmp_path / f"{first}-{then}"
        end(folder, first, 75, stop_after=3)
        end(folder, then, 0, resume=True)
        assert_close(folder, tmp_path / "undisturbed", f"{name}: {first}, then {then}")


def test_deterministic_layout_keeps_its_bits_over_a_resume_on_another_number_of_ranks(
    ranks, tmp_path
):
    lines = ("model._target_=tests.lib.run_toys.Net", "model.dropout=0.2", "deterministic=layout")
    assert run_as_rank(World(), lines, tmp_path / "alone", {}) == {"code": 0}
    for each in ranks.run(2, run_as_rank, lines, tmp_path / "run", {"stop_after": 3}):
        assert each["code"] == 75, each
    assert run_as_rank(World(), lines, tmp_path / "run", {"resume": True}) == {"code": 0}
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert lab.bits(found[name]) == lab.bits(tensor), name


def test_a_split_that_cannot_be_stops_every_rank(ranks, tmp_path):
    lines = (*SIX, "parallel=hsdp", "parallel.shard=3")
    for each in ranks.run(2, run_as_rank, lines, tmp_path, {}):
        assert each["code"] == 2, each
        assert "parallel.shard=3" in each["error"]
        assert "\n" not in each["error"]
