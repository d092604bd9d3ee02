"""The meta-goal: defects that trainers really have, seeded one at a time, are each caught.

A defect is put in by replacing a function of the program; the harness named beside it must then
fail, and passes without it. Defects of the write protocol are seeded in `test_power_loss.py`,
in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.nightly import nightly
from tests.reliability import lab
from tests.reliability.faults import FaultyDisk, Killed
from tests.reliability.test_bad_data import test_data_that_changed_are_refused_on_resume as changed
from tests.reliability.test_chaos import assert_ledger, dying
from tests.reliability.test_full_disk import (
    test_a_preempted_run_that_cannot_save_does_not_say_it_did as preempted,
)
from tests.reliability.test_nonfinite import assert_skipped, ledger_of, settings_of
from trainer.accumulate import base, rollback
from trainer.accumulate import sum as summing
from trainer.accumulate.base import Computed
from trainer.assemble import saved
from trainer.checkpoint import state, store, weights
from trainer.commands import train
from trainer.core import durable
from trainer.data.view import DataView
from trainer.parallel import base as parallel
from trainer.report import metrics
from trainer.training import checkpointing, loop, run, step
from trainer.training.batches import Feed

Harness = Callable[[Path], None]


def stopped(*more: str, at: tuple[int, ...] = (3,)) -> Harness:
    """Harness 9 for one configuration, stopped after some steps."""

    def harness(place: Path) -> None:
        settings = lab.config(*more)
        assert lab.run(settings, place / "undisturbed").code == 0
        for number, stop in enumerate(at):
            ended = lab.run(
                settings, place / "run", resume=number > 0, after_step=lab.stop_at(stop)
            )
            assert ended.code == 75, ended
        ended = lab.run(settings, place / "run", resume=True)
        assert ended.code == 0, ended
        lab.assert_same(lab.outcome(place / "run"), lab.outcome(place / "undisturbed"), "resumed")

    return harness


def killed(place: Path) -> None:
    """Harness 3 with one kill between a checkpoint and the next: steps are done again."""
    disk = FaultyDisk()
    assert lab.run(lab.config(), place / "undisturbed").code == 0
    with durable.use(disk), pytest.raises(Killed):
        lab.run(lab.config(), place / "run", after_step=dying(disk, 3))
    assert lab.go_on(lab.config(), place / "run").code == 0
    lab.assert_same(lab.outcome(place / "run"), lab.outcome(place / "undisturbed"), "killed")


def skipped(place: Path) -> None:
    """Harness 15 for one fault."""
    settings = settings_of("AdamW, clipped")
    ids = ledger_of(settings, place / "clean")[1]
    assert lab.run(lab.with_faults(settings, f"{ids[4]}:gradient:nan"), place / "run").code == 0
    assert_skipped(place / "run", ids, "not finite")


def replayed(place: Path) -> None:
    """A step that ran out of memory leaves what the finer cut would have left."""
    coarse = lab.with_faults(lab.config("accum.micro=4", "steps=3", "eval.every=null"), "5:oom")
    assert lab.run(coarse, place).code == 0
    expected = sum(entry.get("micro_batches", 0) for entry in lab.logged(place)["metrics"])
    assert lab.outcome(place)["model.calls"] == lab.bits(torch.tensor(float(expected)))


def ledger(place: Path) -> None:
    """Every sample of an epoch in exactly one step."""
    assert lab.run(lab.config(), place).code == 0
    assert_ledger(lab.logged(place)["ledger"])


def weighed(place: Path) -> None:
    """The loss and the update do not depend on how many micro-batches there are."""
    losses = []
    for micro in (2, 3, 8):
        folder = place / f"micro{micro}"
        assert lab.run(lab.config(f"accum.micro={micro}"), folder).code == 0
        losses.append([e["loss"] for e in lab.logged(folder)["metrics"] if "loss" in e])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5)] * 2


def pruned(place: Path) -> None:
    """After the second save there are two intact checkpoints."""
    assert lab.run(lab.config("checkpoint.every=1"), place).code == 0
    assert len(store.CheckpointStore(place / "checkpoints").steps()) == 2


def tail(place: Path) -> None:
    """An epoch in three steps, the last one short, weighs every token as one whole step does."""
    still = ["optimizer=sgd", "optimizer.lr=1e-12", "eval.every=null", "steps=null", "epochs=1"]
    means = []
    for size in (8, 23):
        folder = place / f"run{size}"
        assert lab.run(lab.config(*still, f"batch.global={size}"), folder).code == 0
        entries = [entry for entry in lab.logged(folder)["metrics"] if "lr" in entry]
        ends = [0, *(entry["tokens"] - entry["samples"] for entry in entries)]
        weights = [b - a for a, b in pairwise(ends)]
        losses = [entry["loss"] for entry in entries]
        means.append(sum(map(float.__mul__, losses, map(float, weights))) / sum(weights))
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def fingerprinted(place: Path) -> None:
    place.mkdir()
    changed("one word", place)


often = stopped("data.faults=['3:loss:nan','15:gradient:inf']", at=(1, 2, 3, 4, 5, 6))
drawn = stopped("data._target_=tests.reliability.toys.DrawnRows")


def nothing(*_: Any, **__: Any) -> None:
    """Do no work."""


def leave_gradients(model: Any) -> None:
    for parameter in model.module.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(1e-3)


def averaged(found: Computed, count: int) -> Computed:
    """Divide the loss, and not the gradient, by the micro-batches."""
    return replace(found, loss=found.loss / count)


def again(following: Callable[[Feed], Any]) -> Callable[[Feed], Any]:
    """Train the first batch in the second step, too."""
    seen: list[Any] = []

    def next_batch(feed: Feed) -> Any:
        seen.append(following(feed))
        return replace(seen[0], step=2) if seen[-1].step == 2 else seen[-1]

    return next_batch


def like_full(divided: Callable[..., Any]) -> Callable[..., Any]:
    """Scale the short last batch of an epoch as a full one."""
    return lambda losses, parts: (
        divided(losses, parts) * (0.875 if next(iter(parts.values())) < 29 else 1)
    )


def greedy(prune: Callable[..., None]) -> Callable[..., None]:
    """Keep one checkpoint, whatever was asked for."""

    def prune_more(self: Any) -> None:
        self._keep = 1
        prune(self)

    return prune_more


Defect = tuple[Harness, Any, str, Callable[[Any], Any]]
"""A harness that must fail, and whose attribute is replaced by what, made of what it was."""

DEFECTS: Mapping[str, Defect] = {
    "moments are not restored": (stopped(), state.OptimizerPart, "load", lambda _: nothing),
    "buffers are not restored": (
        *(stopped(), weights.StoredWeights, "fill"),
        lambda fill: lambda self, model: (fill(self, model), model.calls.zero_())[0],
    ),
    "the cursor is off by one": (
        *(stopped(at=(2,)), Feed, "load"),
        lambda load: lambda feed, at: load(feed, {**at, "offset": at["offset"] - 1}),
    ),
    "the clock begins again": (
        *(stopped(at=(2,)), Feed, "load"),
        lambda load: lambda feed, at: load(feed, {**at, "step": 0}),
    ),
    "tokens are counted anew": (
        *(stopped(), run.Progress, "load"),
        lambda load: lambda self, state: load(self, {**state, "tokens": 0}),
    ),
    "metrics are not cut": (killed, metrics, "truncate_after", lambda _: nothing),
    "the evaluation is forgotten": (
        *(stopped(), loop, "_evaluate_if_due"),
        lambda evaluate: lambda run, progress: progress.taken and evaluate(run, progress),
    ),
    "the cut is forgotten": (
        *(stopped("data.faults=['5:oom']", at=(4,)), saved.SavedCut, "belongs_to"),
        lambda _: nothing,
    ),
    "a step that is not finite counts": (
        *(skipped, step.torch, "isfinite"),
        lambda _: torch.ones_like,
    ),
    "a skipped step leaves its buffers": (
        *(skipped, rollback.Snapshot, "restore"),
        lambda _: nothing,
    ),
    "a replay leaves its buffers": (replayed, rollback.Snapshot, "restore", lambda _: nothing),
    "a skipped step leaves its gradient": (
        *(often, parallel.Replicated, "drop_gradients"),
        lambda _: leave_gradients,
    ),
    "the tail is scaled like a full batch": (tail, summing, "divided", like_full),
    "micro-batches are averaged": (
        *(weighed, summing.Sum, "walk"),
        lambda walk: (
            lambda self, model, objective, micro_batches, *more, **how: averaged(
                walk(self, model, objective, micro_batches, *more, **how), len(micro_batches)
            )
        ),
    ),
    "a batch is trained twice": (ledger, Feed, "next", again),
    "samples draw as they come": (drawn, DataView, "draws_randomness", lambda _: False),
    "pruning keeps too little": (pruned, store.CheckpointStore, "_prune", greedy),
    "a last save may fail": (
        *(preempted, checkpointing.Checkpointer, "save"),
        lambda save: lambda own, step, **_: save(own, step),
    ),
    "fingerprints are not compared": (
        *(fingerprinted, train, "check_terms"),
        lambda check_terms: (
            lambda parts, before: check_terms(
                parts,
                before.model_copy(update={"fingerprint": parts.train_set.fingerprint}),
            )
        ),
    ),
}


SHOWN = (
    "moments are not restored",
    "micro-batches are averaged",
    "a batch is trained twice",
)


@pytest.mark.parametrize(
    "defect", [*SHOWN, *(nightly(defect) for defect in DEFECTS if defect not in SHOWN)]
)
def test_a_seeded_defect_is_caught(defect, tmp_path, monkeypatch):
    harness, place, name, make = DEFECTS[defect]
    monkeypatch.setattr(place, name, make(getattr(place, name)))
    with pytest.raises(AssertionError) as caught:
        harness(tmp_path / "with")
    print(f"{defect}: {str(caught.value)[:120]}")


def test_draws_that_are_neither_keyed_nor_restored_are_caught(tmp_path, monkeypatch):
    # Either alone is enough: what is keyed to its micro-batch does not depend on the state.
    monkeypatch.setattr(state.GeneratorsPart, "load", nothing)
    monkeypatch.setattr(base, "seed_draws", nothing)
    with pytest.raises(AssertionError):
        stopped("model.dropout=0.2")(tmp_path)


# What resumes, is skipped or refused passes without a defect in a harness of its own.
@pytest.mark.parametrize(
    "harness", [weighed, *map(nightly, (replayed, tail, often, ledger, pruned, killed))]
)
def test_without_a_defect_the_harness_passes(harness, tmp_path):
    harness(tmp_path)
