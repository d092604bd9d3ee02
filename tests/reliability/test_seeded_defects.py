"""The meta-goal: defects that trainers really have, seeded one at a time, are each caught.

A defect is put in by replacing a function of the program; the harness named beside it must then
fail, and passes without it. Defects of the write protocol are seeded in `test_power_loss.py`,
`test_write_points.py`, `test_bit_rot.py` and `test_full_disk.py`, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability import lab, test_chaos, test_full_disk, test_nonfinite
from tests.reliability.test_bad_data import (
    change_one_byte,
)
from tests.reliability.test_bad_data import (
    test_data_that_changed_are_refused_on_resume as refuses_changed_data,
)
from trainer.accumulate import rollback
from trainer.accumulate import sum as summing
from trainer.build import prepare
from trainer.checkpoint import state, store
from trainer.commands import train
from trainer.data.view import DataView
from trainer.parallel import base as parallel
from trainer.plan.order import Cursor
from trainer.report import metrics
from trainer.training import checkpointing, loop, progress, step
from trainer.training.batches import Feed

Patch = pytest.MonkeyPatch
Harness = Callable[[Path], None]


def stopped(*more: str, at: int = 3) -> Harness:
    """Harness 9 for one configuration and one stop."""

    def harness(place: Path) -> None:
        settings = lab.config(*more)
        assert lab.run(settings, place / "undisturbed").code == 0
        assert lab.run(settings, place / "run", after_step=lab.stop_at(at)).code == 75
        ended = lab.run(settings, place / "run", resume=True)
        assert ended.code == 0, ended
        lab.assert_same(lab.outcome(place / "run"), lab.outcome(place / "undisturbed"), "resumed")

    return harness


def skipped(place: Path) -> None:
    """Harness 15 for one fault."""
    settings = test_nonfinite.settings_of("AdamW, clipped")
    ids = test_nonfinite.ids_of_step_2(settings, place / "clean")
    assert lab.run(lab.with_faults(settings, f"{ids[4]}:gradient:nan"), place / "run").code == 0
    test_nonfinite.assert_skipped(place / "run", ids, "not finite")


def replayed(place: Path) -> None:
    """A step that ran out of memory leaves what the finer cut would have left."""
    coarse = lab.with_faults(lab.config("accum.micro=4", "steps=3", "eval.every=null"), "5:oom")
    assert lab.run(coarse, place / "coarse").code == 0
    calls = lab.outcome(place / "coarse")["model.calls"]
    entries = lab.logged(place / "coarse")["metrics"]
    expected = sum(entry.get("micro_batches", 0) for entry in entries)
    assert calls == lab.bits(torch.tensor(float(expected)))


def ledger(place: Path) -> None:
    """Every sample of an epoch in exactly one step."""
    assert lab.run(lab.config(), place / "run").code == 0
    test_chaos.assert_ledger(lab.logged(place / "run")["ledger"])


def weighed(place: Path) -> None:
    """The loss and the update do not depend on how many micro-batches there are."""
    losses = []
    for micro in (2, 3, 8):
        folder = place / f"micro{micro}"
        assert lab.run(lab.config(f"accum.micro={micro}"), folder).code == 0
        losses.append([e["loss"] for e in lab.logged(folder)["metrics"] if "loss" in e])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def kept(place: Path) -> None:
    """After the second save there are two intact checkpoints."""
    assert lab.run(lab.config("checkpoint.every=1"), place / "run").code == 0
    assert len(store.CheckpointStore(place / "run" / "checkpoints").steps()) == 2


def honest(place: Path) -> None:
    test_full_disk.test_a_preempted_run_that_cannot_save_does_not_say_it_did(place)


def stopped_often(place: Path) -> None:
    """Harness 9 with steps that are skipped, stopped after each step."""
    settings = lab.config("data.faults=['3:loss:nan','15:gradient:inf']")
    assert lab.run(settings, place / "undisturbed").code == 0
    for stop in range(1, 7):
        ended = lab.run(settings, place / "run", resume=stop > 1, after_step=lab.stop_at(stop))
        assert ended.code == 75
    assert lab.run(settings, place / "run", resume=True).code == 0
    lab.assert_same(lab.outcome(place / "run"), lab.outcome(place / "undisturbed"), "stopped")


def tail(place: Path) -> None:
    """An epoch in three steps, the last one short, weighs every token as one whole step does."""
    still = ["optimizer=sgd", "optimizer.lr=1e-12", "eval.every=null"]
    means = []
    for number, size in enumerate((8, 23)):
        settings = lab.config(*still, "steps=null", "epochs=1", f"batch.global={size}")
        assert lab.run(settings, place / f"run{number}").code == 0
        log = lab.logged(place / f"run{number}")
        entries = [entry for entry in log["metrics"] if "lr" in entry]
        ends = [0, *(entry["tokens"] - entry["samples"] for entry in entries)]
        weights = [b - a for a, b in pairwise(ends)]
        losses = [entry["loss"] for entry in entries]
        means.append(sum(map(float.__mul__, losses, map(float, weights))) / sum(weights))
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def fingerprinted(place: Path) -> None:
    place.mkdir()
    refuses_changed_data(change_one_byte, place)


def draws_are_neither_keyed_nor_restored(patch: Patch) -> None:
    # Either alone is enough: what is keyed to its micro-batch does not depend on the state.
    patch.setattr(state, "_restore_random_states", lambda states: None)
    patch.setattr("trainer.accumulate.sum.seed_draws", lambda key, device: None)


def moments_are_not_restored(patch: Patch) -> None:
    patch.setattr(state, "_restore_optimizer", lambda *arguments, **more: None)


def buffers_are_not_restored(patch: Patch) -> None:
    load = state.load_model

    def forget(model: Any, weights: Mapping[str, Any], *more: Any) -> None:
        load(model, {**weights, "calls": torch.zeros(())}, *more)

    patch.setattr(state, "load_model", forget)


def the_cursor_is_off_by_one(patch: Patch) -> None:
    def off(**fields: int) -> Cursor:
        return replace(Cursor(**fields), offset=fields["offset"] + 1)

    patch.setattr(train, "Cursor", off)


def the_clock_begins_again(patch: Patch) -> None:
    def again(**fields: int) -> Cursor:
        return Cursor(**{**fields, "step": 0})

    patch.setattr(train, "Cursor", again)


def tokens_are_counted_anew(patch: Patch) -> None:
    init = progress.Trained.__init__

    def forget(trained: Any, **fields: Any) -> None:
        init(trained, **{**fields, "total_tokens": 0})

    patch.setattr(progress.Trained, "__init__", forget)


def metrics_are_not_cut(patch: Patch) -> None:
    patch.setattr(metrics, "truncate_after", lambda path, step: None)


def the_evaluation_is_forgotten(patch: Patch) -> None:
    patch.setattr(loop, "_catch_up", lambda run, progress: None)


def the_cut_is_forgotten(patch: Patch) -> None:
    patch.setattr(prepare, "_restored", lambda parts, saved: None)


def a_step_that_is_not_finite_counts(patch: Patch) -> None:
    patch.setattr(step.torch, "isfinite", torch.ones_like)


def a_skipped_step_leaves_its_buffers(patch: Patch) -> None:
    patch.setattr(rollback.Snapshot, "restore", lambda kept: None)


def a_skipped_step_leaves_its_gradient(patch: Patch) -> None:
    def leave(model: Any) -> None:
        for parameter in model.module.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(1e-3)

    patch.setattr(parallel.Replicated, "drop_gradients", leave)


def the_tail_is_scaled_like_a_full_batch(patch: Patch) -> None:
    divided = summing.divided

    def like_full(losses: Any, parts: Any) -> Any:
        loss = divided(losses, parts)
        return loss * 0.875 if next(iter(parts.values())) < 29 else loss

    patch.setattr(summing, "divided", like_full)


def micro_batches_are_averaged(patch: Patch) -> None:
    backward = summing.Sum.backward

    def mean(strategy: Any, model: Any, objective: Any, micro_batches: Any, *more: Any) -> Any:
        return backward(strategy, model, objective, micro_batches, *more) / len(micro_batches)

    patch.setattr(summing.Sum, "backward", mean)


def a_batch_is_trained_twice(patch: Patch) -> None:
    following = Feed.next
    last: list[Any] = []

    def again(feed: Feed) -> Any:
        batch = following(feed)
        last.append(batch)
        return replace(last[0], step=batch.step) if batch.step == 2 else batch

    patch.setattr(Feed, "next", again)


def samples_draw_as_they_come(patch: Patch) -> None:
    patch.setattr(DataView, "draws_randomness", False)


def pruning_keeps_too_little(patch: Patch) -> None:
    prune = store.CheckpointStore._prune

    def greedy(self: store.CheckpointStore) -> None:
        self._keep = 1
        prune(self)

    patch.setattr(store.CheckpointStore, "_prune", greedy)


def a_last_save_may_fail(patch: Patch) -> None:
    save = checkpointing.Checkpointer.save

    def may_fail(own: Any, tokens: int, failures: int, *, is_last: bool = False) -> None:
        save(own, tokens, failures)

    patch.setattr(checkpointing.Checkpointer, "save", may_fail)


def fingerprints_are_not_compared(patch: Patch) -> None:
    patch.setattr(train, "check_terms", lambda *terms: None)


def killed_later(place: Path) -> None:
    """Harness 3 with one kill between a checkpoint and the next: steps are done again."""
    settings = lab.config()
    assert lab.run(settings, place / "undisturbed").code == 0
    schedule = test_chaos.FaultyDisk()
    with test_chaos.durable.use(schedule), pytest.raises(test_chaos.Killed):
        lab.run(settings, place / "run", after_step=test_chaos._dying(schedule, 3))
    assert lab.go_on(settings, place / "run").code == 0
    lab.assert_same(lab.outcome(place / "run"), lab.outcome(place / "undisturbed"), "killed")


DEFECTS: Mapping[Callable[[Patch], None], Harness] = {
    draws_are_neither_keyed_nor_restored: stopped("model.dropout=0.2"),
    moments_are_not_restored: stopped(),
    buffers_are_not_restored: stopped(),
    the_cursor_is_off_by_one: stopped(at=2),
    the_clock_begins_again: stopped(),
    tokens_are_counted_anew: stopped(),
    metrics_are_not_cut: killed_later,
    the_evaluation_is_forgotten: stopped(at=3),
    the_cut_is_forgotten: stopped("data.faults=['5:oom']", at=4),
    a_step_that_is_not_finite_counts: skipped,
    a_skipped_step_leaves_its_buffers: skipped,
    a_skipped_step_leaves_its_gradient: stopped_often,
    the_tail_is_scaled_like_a_full_batch: tail,
    micro_batches_are_averaged: weighed,
    a_batch_is_trained_twice: ledger,
    samples_draw_as_they_come: stopped("data._target_=tests.reliability.toys.DrawnRows"),
    pruning_keeps_too_little: kept,
    a_last_save_may_fail: honest,
    fingerprints_are_not_compared: fingerprinted,
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_seeded_defect_is_caught(
    defect: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    harness = DEFECTS[defect]
    with monkeypatch.context() as patch:
        defect(patch)
        with pytest.raises(AssertionError) as caught:
            harness(tmp_path / "with")
    print(f"{defect.__name__}: {caught.type.__name__}: {str(caught.value)[:120]}")


@pytest.mark.parametrize(
    "harness",
    [skipped, replayed, ledger, weighed, tail, stopped_often, kept, killed_later],
    ids=lambda h: h.__name__,
)
def test_without_the_defect_the_harness_passes(harness: Harness, tmp_path: Path) -> None:
    harness(tmp_path)


def test_a_replay_without_the_buffers_is_caught(tmp_path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        a_skipped_step_leaves_its_buffers(patch)
        with pytest.raises(AssertionError):
            replayed(tmp_path)
