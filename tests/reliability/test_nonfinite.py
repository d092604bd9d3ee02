"""Harnesses 15 and 16: what is not finite, and what weighs nothing, changes nothing.

A fault sits in one micro-batch of step 2, in the loss or in the gradient alone. Parameters,
moments and buffers after the step are those before it, bit for bit; the clock and the position in
the data go on; the samples are in the ledger as skipped; the step after it updates again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.nightly import nightly
from tests.reliability import lab, toys
from trainer.checkpoint.store import CheckpointStore
from trainer.config.run_config import RunConfig

KINDS = [f"{where}:{value}" for where in ("loss", "gradient") for value in ("nan", "inf", "-inf")]
VARIANTS = {
    "AdamW, clipped": [],
    "SGD, not clipped": ["optimizer=sgd", "optimizer.lr=0.05", "clip_norm=null"],
    "dropout, BatchNorm": ["model.dropout=0.2", "model.norm=true", "batchnorm=micro"],
}


def settings_of(variant: str) -> RunConfig:
    return lab.config(*VARIANTS[variant], "steps=3", "checkpoint.every=1", "checkpoint.keep=9")


def ledger_of(settings: RunConfig, folder: Path) -> list[list[int]]:
    """The ids of every step of a run without faults."""
    assert lab.run(settings, folder).code == 0
    return [entry["ids"] for entry in lab.logged(folder)["ledger"]]


def trained(folder: Path, step: int) -> dict[str, Any]:
    """What steps change: weights, buffers, moments."""
    found = lab.outcome(folder, step=step)
    return {n: value for n, value in found.items() if n.startswith(("model.", "optimizer."))}


def assert_skipped(folder: Path, ids: list[int], why: str) -> None:
    before, after, later = (trained(folder, step) for step in (1, 2, 3))
    lab.assert_same(after, before, "the step that is skipped")
    assert lab.difference(later, after), "the step after it updated nothing"
    store = CheckpointStore(folder / "checkpoints")
    cursors = [store.load(step).meta["extra"]["cursor"] for step in (1, 2)]
    assert [cursor["step"] for cursor in cursors] == [1, 2]
    assert cursors[1]["samples"] - cursors[0]["samples"] == len(ids)
    log = lab.logged(folder)
    assert log["ledger"][1] == {"step": 2, "ids": ids, "skipped": ids}
    assert [entry["step"] for entry in log["ledger"] if "skipped" in entry] == [2]
    entries = [entry for entry in log["metrics"] if "lr" in entry]
    assert [entry.get("skipped") for entry in entries] == [None, why, None]
    assert len({entry["lr"] for entry in entries}) == 3


@pytest.mark.parametrize(
    ("variant", "is_full"),
    [*((name, False) for name in VARIANTS), *(nightly(name, True) for name in VARIANTS)],
)
def test_a_value_that_is_not_finite_anywhere_skips_the_whole_step(variant, is_full, tmp_path):
    """Every kind once, and every micro-batch; nightly each in each."""
    settings = settings_of(variant)
    ids = ledger_of(settings, tmp_path / "clean")[1]
    places = ids[0::3]
    pairs = [(kind, place) for kind in KINDS for place in places]
    if not is_full:
        pairs = [(kind, places[number % len(places)]) for number, kind in enumerate(KINDS)]
    for kind, place in pairs:
        folder = tmp_path / f"{kind}{place}"
        ended = lab.run(lab.with_faults(settings, f"{place}:{kind}"), folder)
        assert ended.code == 0, ended
        assert "step 2 updated nothing: not finite" in " ".join(ended.screen.split())
        assert_skipped(folder, ids, "not finite")


def test_too_many_in_a_row_end_the_run_saved_and_finite_and_rows_outlast_a_stop(tmp_path):
    ids = [step[0] for step in ledger_of(lab.config(), tmp_path / "clean")]
    settings = lab.config("nonfinite.limit=2")
    ended = lab.run(
        lab.with_faults(settings, *(f"{i}:loss:nan" for i in ids[1:3])), tmp_path / "run"
    )
    assert ended.code == lab.status(tmp_path / "run")["exit_code"] == 6
    assert "3" in ended.error
    assert "\n" not in ended.error
    loaded = CheckpointStore(tmp_path / "run" / "checkpoints").load()
    assert loaded.step == 3
    floating = [n for n, t in loaded.tensors.items() if t.dtype.is_floating_point]
    assert all(torch.isfinite(loaded.read(name)).all() for name in floating)
    apart = lab.with_faults(settings, *(f"{ids[step]}:loss:nan" for step in (0, 2)))
    assert lab.run(apart, tmp_path / "apart", after_step=lab.stop_at(3)).code == 75
    three = lab.config("nonfinite.limit=3")
    faulty = lab.with_faults(three, *(f"{ids[step]}:loss:nan" for step in (2, 3, 4)))
    assert lab.run(faulty, tmp_path / "on", after_step=lab.stop_at(4)).code == 75
    ended = lab.run(faulty, tmp_path / "on", resume=True)
    assert ended.code == 6, ended
    assert "step 5" in ended.error
    assert "3 steps in a row" in ended.error


@pytest.mark.parametrize(
    ("name", "value"), [("head.weight", math.inf), ("calls", math.nan), ("mask", math.inf)]
)
def test_state_that_became_infinite_is_never_saved_and_masks_are(
    name, value, tmp_path, monkeypatch
):
    def spoil(step: int) -> None:
        if step == 3:
            tensors = {**dict(nets[-1].named_parameters()), **dict(nets[-1].named_buffers())}
            tensors[name].data.flatten()[:1] = value

    init = toys.Net.__init__
    nets: list[toys.Net] = []

    def masked(net: toys.Net, width: int = 8) -> None:
        init(net, width)
        net.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))
        nets.append(net)

    monkeypatch.setattr(toys.Net, "__init__", masked)
    ended = lab.run(lab.config("steps=5"), tmp_path, after_step=spoil)
    assert ended.code == 6, ended
    assert f"{name} not finite" in ended.error
    assert "\n" not in ended.error
    assert CheckpointStore(tmp_path / "checkpoints").load().step == 2
    assert lab.run(lab.config("steps=5"), tmp_path, resume=True).code == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_weighs_nothing_changes_nothing(variant, tmp_path):
    settings = settings_of(variant)
    ids = ledger_of(settings, tmp_path / "clean")[1]
    for empty in (ids[:1], ids[:3], ids):  # a sample, a micro-batch, the step
        folder = tmp_path / f"run{len(empty)}"
        faulty = lab.with_faults(settings, *(f"{i}:unlabelled" for i in empty))
        assert lab.run(faulty, folder).code == 0
        if empty == ids:
            assert_skipped(folder, ids, "no loss terms")
            continue
        entries = [entry for entry in lab.logged(folder)["metrics"] if "lr" in entry]
        assert all(entry["loss"] is not None for entry in entries)
        assert not any("skipped" in entry for entry in entries)
        assert lab.difference(trained(folder, 2), trained(folder, 1))
