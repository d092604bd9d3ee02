"""Harnesses 15 and 16: what is not finite, and what weighs nothing, changes nothing.

Weights, moments, buffers and average after the step are those before it, bit for bit; the clock and
the position in the data go on, and the samples are in the ledger as skipped.
"""

import math
from itertools import product
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


def settings_of(variant: str, steps: int = 3) -> RunConfig:
    """A run that takes every sample at most once and keeps every step."""
    return lab.config(
        *VARIANTS[variant],
        *(f"steps={steps}", f"+data.size={8 * steps}"),
        *("checkpoint.every=1", f"checkpoint.keep={steps + 1}", "ema.decay=0.5"),
    )


def ledger_of(settings: RunConfig, folder: Path) -> list[list[int]]:
    """The ids of every step of a run without faults."""
    assert lab.run(settings, folder).code == 0
    return [entry["ids"] for entry in lab.logged(folder)["ledger"]]


def trained(folder: Path, step: int) -> dict[str, Any]:
    """What steps change: weights, buffers, moments, the average of the weights."""
    found = lab.outcome(folder, step=step)
    return {
        n: value for n, value in found.items() if n.startswith(("model.", "optimizer.", "ema."))
    }


def assert_skipped(folder: Path, ids: list[int], why: str, step: int = 2) -> None:
    before, after, later = (trained(folder, step + k) for k in (-1, 0, 1))
    lab.assert_same(after, before, "the step that is skipped")
    assert lab.difference(later, after), "the step after it updated nothing"
    store = CheckpointStore(folder / "checkpoints")
    cursors = [store.load(step + k).parts["data"]["state"] for k in (-1, 0)]
    assert [cursor["step"] for cursor in cursors] == [step - 1, step]
    assert cursors[1]["samples"] - cursors[0]["samples"] == len(ids)
    log = lab.logged(folder)
    assert log["ledger"][step - 1] == {"step": step, "ids": ids, "skipped": ids}
    entries = [entry for entry in log["metrics"] if "lr" in entry][step - 2 : step + 1]
    assert [entry.get("skipped") for entry in entries] == [None, why, None]
    # A step of warm-up may give the first two the same.
    assert entries[1]["lr"] != entries[2]["lr"], "the skipped step counts"


@pytest.mark.parametrize(
    ("variant", "is_full"),
    [("dropout, BatchNorm", False), *(nightly(name, True) for name in VARIANTS)],
)
def test_a_value_that_is_not_finite_anywhere_skips_the_whole_step(variant, is_full, tmp_path):
    """Every kind once, and every micro-batch, in every second step; nightly each in each."""
    pairs = [(kind, number % 3) for number, kind in enumerate(KINDS)]
    if is_full:
        pairs = list(product(KINDS, range(3)))
    settings = settings_of(variant, 2 * len(pairs) + 1)
    steps = ledger_of(settings, tmp_path / "clean")[1::2]
    faults = [f"{ids[3 * at]}:{kind}" for ids, (kind, at) in zip(steps, pairs, strict=True)]
    ended = lab.run(lab.with_faults(settings, *faults), tmp_path / "run")
    assert ended.code == 0, ended
    screen = " ".join(ended.screen.split())
    for number, ids in enumerate(steps):
        assert f"step {2 * number + 2} changed no weight: not finite" in screen
        assert_skipped(tmp_path / "run", ids, "not finite", 2 * number + 2)
    skipped = [e["step"] for e in lab.logged(tmp_path / "run")["ledger"] if "skipped" in e]
    assert skipped == list(range(2, 2 * len(pairs) + 1, 2))


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
    assert all(torch.isfinite(loaded.tensors[name][...]).all() for name in floating)
    apart = lab.with_faults(settings, *(f"{ids[step]}:loss:nan" for step in (0, 2)))
    assert lab.run(apart, tmp_path / "apart", after_step=lab.stop_at(3)).code == 75
    three = lab.config("nonfinite.limit=3")
    faulty = lab.with_faults(three, *(f"{ids[step]}:loss:nan" for step in (2, 3, 4)))
    assert lab.run(faulty, tmp_path / "on", after_step=lab.stop_at(4)).code == 75
    ended = lab.run(faulty, tmp_path / "on", resume=True)
    assert ended.code == 6, ended
    assert "step 5" in ended.error
    assert "3 steps in a row" in ended.error


def test_state_that_became_infinite_is_never_saved_and_masks_are(tmp_path, monkeypatch):
    init = toys.Net.__init__
    nets: list[toys.Net] = []

    def masked(net: toys.Net, width: int = 8) -> None:
        init(net, width)
        net.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))
        nets.append(net)

    def spoil(step: int) -> None:
        if step == 3:
            nets[-1].head.weight.data[0, 0] = math.inf
            nets[-1].calls.fill_(math.nan)

    monkeypatch.setattr(toys.Net, "__init__", masked)
    ended = lab.run(lab.config("steps=5"), tmp_path, after_step=spoil)
    assert ended.code == 6, ended
    assert "calls, model.head.weight not finite" in ended.error
    assert "\n" not in ended.error
    assert CheckpointStore(tmp_path / "checkpoints").load().step == 2
    assert lab.run(lab.config("steps=5"), tmp_path, resume=True).code == 0


def test_what_weighs_nothing_changes_nothing(tmp_path):
    settings = settings_of("AdamW, clipped", 7)
    sample, micro_batch, step = ledger_of(settings, tmp_path / "clean")[1::2]
    empty = (*sample[:1], *micro_batch[:3], *step)
    faulty = lab.with_faults(settings, *(f"{i}:unlabelled" for i in empty))
    assert lab.run(faulty, tmp_path / "run").code == 0
    assert_skipped(tmp_path / "run", step, "no loss terms", 6)
    entries = [entry for entry in lab.logged(tmp_path / "run")["metrics"] if "lr" in entry]
    assert [e["step"] for e in entries if "skipped" in e or e["loss"] is None] == [6]
    for number in (2, 4):
        assert lab.difference(
            trained(tmp_path / "run", number), trained(tmp_path / "run", number - 1)
        )
