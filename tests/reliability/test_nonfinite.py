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

from tests.reliability import lab, toys
from trainer.checkpoint.store import CheckpointStore
from trainer.config.run_config import RunConfig

KINDS = ["loss:nan", "loss:inf", "loss:-inf", "gradient:nan", "gradient:inf", "gradient:-inf"]
VARIANTS = {
    "AdamW, clipped": [],
    "SGD, not clipped": ["optimizer=sgd", "optimizer.lr=0.05", "clip_norm=null"],
    "dropout, BatchNorm": ["model.dropout=0.2", "model.norm=true", "batchnorm=micro"],
}
TRAINED = ("model.", "optimizer.")


def settings_of(variant: str) -> RunConfig:
    return lab.config(*VARIANTS[variant], "steps=3", "checkpoint.every=1", "checkpoint.keep=9")


def ids_of_step_2(settings: RunConfig, folder: Path) -> list[int]:
    assert lab.run(settings, folder).code == 0
    ids: list[int] = lab.logged(folder)["ledger"][1]["ids"]
    return ids


def trained(folder: Path, step: int) -> dict[str, Any]:
    """What steps change: weights, buffers, moments."""
    found = lab.outcome(folder, step=step)
    return {name: value for name, value in found.items() if name.startswith(TRAINED)}


def assert_skipped(folder: Path, ids: list[int], why: str) -> None:
    before, after, later = (trained(folder, step) for step in (1, 2, 3))
    lab.assert_same(after, before, "the step that is skipped")
    assert lab.difference(later, after), "the step after it updated nothing"
    cursors = [
        CheckpointStore(folder / "checkpoints").load(step).meta["extra"]["cursor"]
        for step in (1, 2)
    ]
    assert [cursor["step"] for cursor in cursors] == [1, 2]
    assert cursors[1]["samples"] - cursors[0]["samples"] == len(ids)
    log = lab.logged(folder)
    assert log["ledger"][1] == {"step": 2, "ids": ids, "skipped": ids}
    assert [entry["step"] for entry in log["ledger"] if "skipped" in entry] == [2]
    entries = [entry for entry in log["metrics"] if "lr" in entry]
    assert [entry.get("skipped") for entry in entries] == [None, why, None]
    assert len({entry["lr"] for entry in entries}) == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_value_that_is_not_finite_anywhere_skips_the_whole_step(
    variant: str, tmp_path: Path
) -> None:
    settings = settings_of(variant)
    ids = ids_of_step_2(settings, tmp_path / "clean")
    strikes = 0
    for kind in KINDS:
        for struck in ids[0::3]:  # one of each micro-batch
            folder = tmp_path / f"{kind}{struck}"
            ended = lab.run(lab.with_faults(settings, f"{struck}:{kind}"), folder)
            assert ended.code == 0, ended
            assert_skipped(folder, ids, "not finite")
            strikes += 1
    print(f"{strikes} faults, {len(KINDS)} kinds, every micro-batch")


def test_too_many_in_a_row_end_the_run_saved_and_finite(tmp_path: Path) -> None:
    settings = lab.config("nonfinite.limit=2", "steps=7")
    ids = [entry["ids"][0] for entry in _ledger(lab.config("steps=7"), tmp_path / "clean")]
    faulty = lab.with_faults(settings, *(f"{i}:loss:nan" for i in (ids[1], ids[2])))
    ended = lab.run(faulty, tmp_path / "run")
    assert ended.code == 6
    assert "3" in ended.error
    assert "\n" not in ended.error
    assert lab.status(tmp_path / "run")["exit_code"] == 6
    loaded = CheckpointStore(tmp_path / "run" / "checkpoints").load()
    assert loaded.step == 3
    floating = [n for n, t in loaded.tensors.items() if t.dtype.is_floating_point]
    assert all(torch.isfinite(loaded.read(name)).all() for name in floating)
    one_apart = lab.with_faults(
        lab.config("nonfinite.limit=2", "steps=3"), *(f"{i}:loss:nan" for i in (ids[0], ids[2]))
    )
    assert lab.run(one_apart, tmp_path / "apart").code == 0


def test_steps_in_a_row_are_counted_on_over_a_resumption(tmp_path: Path) -> None:
    settings = lab.config("nonfinite.limit=3", "steps=7")
    ids = [entry["ids"][0] for entry in _ledger(lab.config("steps=7"), tmp_path / "clean")]
    faulty = lab.with_faults(settings, *(f"{ids[step]}:loss:nan" for step in (2, 3, 4)))
    ended = lab.run(faulty, tmp_path / "run", after_step=lab.stop_at(4))
    assert ended.code == 75
    ended = lab.run(faulty, tmp_path / "run", resume=True)
    assert ended.code == 6, ended
    assert "step 5" in ended.error
    assert "3 steps in a row" in ended.error


def _ledger(settings: RunConfig, folder: Path) -> list[dict[str, Any]]:
    assert lab.run(settings, folder).code == 0
    found: list[dict[str, Any]] = lab.logged(folder)["ledger"]
    return found


def test_weights_that_became_infinite_are_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(step: int) -> None:
        if step == 3:
            nets[-1].head.weight.data[0, 0] = math.inf

    init = toys.Net.__init__
    nets: list[toys.Net] = []

    def remember(net: toys.Net, width: int = 8) -> None:
        init(net, width)
        nets.append(net)

    monkeypatch.setattr(toys.Net, "__init__", remember)
    ended = lab.run(lab.config(), tmp_path, after_step=spoil)
    assert ended.code == 6
    assert "head.weight" in ended.error
    assert CheckpointStore(tmp_path / "checkpoints").load().step == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["calls", "mask"])
def test_buffers_that_became_infinite_are_never_saved_and_masks_are(
    name: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(step: int) -> None:
        if step == 3:
            getattr(nets[-1], name).fill_(value)

    init = toys.Net.__init__
    nets: list[toys.Net] = []

    def masked(net: toys.Net, width: int = 8) -> None:
        init(net, width)
        net.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))
        nets.append(net)

    monkeypatch.setattr(toys.Net, "__init__", masked)
    ended = lab.run(lab.config("steps=5"), tmp_path, after_step=spoil)
    assert ended.code == 6, ended
    assert f"model.{name} not finite" in ended.error
    assert "\n" not in ended.error
    assert CheckpointStore(tmp_path / "checkpoints").load().step == 2
    assert lab.run(lab.config("steps=5"), tmp_path, resume=True).code == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("unlabelled", ["one sample", "a micro-batch", "the step"])
def test_what_weighs_nothing_changes_nothing(unlabelled: str, variant: str, tmp_path: Path) -> None:
    settings = settings_of(variant)
    ids = ids_of_step_2(settings, tmp_path / "clean")
    empty = {"one sample": ids[:1], "a micro-batch": ids[:3], "the step": ids}[unlabelled]
    faulty = lab.with_faults(settings, *(f"{i}:unlabelled" for i in empty))
    assert lab.run(faulty, tmp_path / "run").code == 0
    if unlabelled == "the step":
        assert_skipped(tmp_path / "run", ids, "no loss terms")
        return
    entries = [entry for entry in lab.logged(tmp_path / "run")["metrics"] if "lr" in entry]
    assert all(entry["loss"] is not None and math.isfinite(entry["loss"]) for entry in entries)
    assert not any("skipped" in entry for entry in entries)
    assert lab.difference(trained(tmp_path / "run", 2), trained(tmp_path / "run", 1))
