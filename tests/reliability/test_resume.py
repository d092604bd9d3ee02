"""Harness 9: stopped anywhere and resumed, a run ends as one that was not stopped, bit for bit."""

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.lib.nightly import nightly, slow
from tests.reliability import lab
from tests.reliability.support import SEED
from trainer.accumulate import base
from trainer.checkpoint.state import GeneratorsPart, OptimizerPart
from trainer.checkpoint.weights import StoredWeights
from trainer.training import loop
from trainer.training.batches import Feed
from trainer.training.loop import Progress

TOYS = "tests.lib.run_toys"
DRAWN = "data._target_=tests.reliability.toys.DrawnRows"
TORCH = "optimizer.lr=0.01 optimizer._target_=torch.optim"
SHOWN = {
    "BatchNorm, bfloat16, warm-up and decay": (
        "model.norm=true batchnorm=micro precision=bf16 scheduler=wsd scheduler.warmup=3"
    ),
    "augmented by generators of their own in loading processes": (
        "data._target_=tests.reliability.toys.OwnDrawnRows num_workers=2"
    ),
    "memory that runs out, steps that are not finite": (
        "data.faults=['5:oom','3:loss:nan','11:gradient:inf'] model.dropout=0.3"
    ),
}
SHOWN_FIRST = "memory that runs out, steps that are not finite"
REPEATED = {
    "planned and tuned, dropout": "accum=auto accum.micro=null model.dropout=0.3",
    "SGD with momentum, tied and frozen weights": (
        "optimizer=sgd optimizer.lr=0.05 clip_norm=null model.tied=true model.frozen=true"
    ),
    "two loss terms, a mean of means": (
        "objective.z_loss=0.01 objective.label_smoothing=0.1 batch.normalizer=micro_batches"
    ),
    "augmented in loading processes, epochs without short batches": (
        f"{DRAWN} num_workers=2 batch.tail=drop steps=null epochs=3"
    ),
    "written behind, an optimizer by hand": (
        f"checkpoint.asynchronous=true optimizer._target_={TOYS}.Descent optimizer.weight_decay=0.1"
    ),
    "a cut of one's own over batches of tokens": (
        f"accum._target_={TOYS}.Pairs batch=tokens batch.global=35"
    ),
    "AdamW, cosine": "",
    "always clipped": "clip_norm=0.01",
    "ragged accumulation": "accum.micro=null accum.steps=5",
    "planned under a budget": "accum=budget accum.micro=null accum.max_tokens=20 model.dropout=0.3",
    "no cadence": "checkpoint.every=null eval.every=null",
    "everything at every step": "checkpoint.every=1 eval.every=1",
    "AMSGrad": f"{TORCH}.Adam optimizer.amsgrad=true",
    **{name: f"{TORCH}.{name}" for name in ("Adagrad", "RMSprop", "NAdam", "Adamax", "ASGD")},
    "constant rate": "scheduler=constant",
    "one micro-batch": "accum.micro=8",
    "mean over samples": "batch.normalizer=samples",
    "samples without a label": "data.faults=['5:unlabelled','6:unlabelled']",
    "loading processes": "num_workers=2",
}
EVERY = SHOWN | REPEATED


def chain(name: str, stops: list[int], undisturbed: Path, folder: Path) -> None:
    """Run a configuration, stopped after some steps, and compare."""
    settings = lab.config(*EVERY[name].split())
    for number, stop in enumerate(stops):
        ended = lab.run(settings, folder, resume=number > 0, after_step=lab.stop_at(stop))
        assert ended.code == 75, ended
    ended = lab.run(settings, folder, resume=bool(stops))
    assert ended.code == 0, ended
    found, expected = lab.outcome(folder), lab.outcome(undisturbed)
    if "accum=auto" in EVERY[name]:  # what was measured while tuning differs
        found["parts"] = expected["parts"]
    lab.assert_same(found, expected, f"stopped after {stops}")


@pytest.mark.parametrize(
    ("name", "is_full"),
    [
        (SHOWN_FIRST, False),
        *(slow(name, False) for name in SHOWN if name != SHOWN_FIRST),
        *(nightly(name, True) for name in EVERY),
    ],
)
def test_a_run_that_is_stopped_and_resumed_ends_as_the_undisturbed_one(name, is_full, tmp_path):
    ended = lab.run(lab.config(*EVERY[name].split()), tmp_path / "undisturbed")
    assert ended.code == 0, ended
    steps = range(1, int(lab.outcome(tmp_path / "undisturbed")["step"]))
    chance = Random(f"{SEED} {name}")
    points = [sorted(chance.sample(steps, 2))]
    if is_full:
        points = [list(steps), sorted(chance.sample(steps, 3))]
    for number, stops in enumerate(points):
        chain(name, stops, tmp_path / "undisturbed", tmp_path / f"run{number}")
    print(f"{name}: stopped at {points}")


def without(*_: object) -> None:
    """Do no work."""


def moved_back(key: str, by: int) -> Callable[[Any], Any]:
    """Let a position be restored that is not the one that was saved."""
    return lambda load: lambda part, state: load(part, state | {key: state[key] - by})


DEFECTS: Mapping[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "moments are not restored": (OptimizerPart, "load", lambda _: without),
    "buffers are not restored": (
        StoredWeights,
        "fill",
        lambda fill: lambda weights, model: (fill(weights, model), model.calls.zero_())[0],
    ),
    "the position in the data is off by one": (Feed, "load", moved_back("offset", 1)),
    "steps are counted anew": (Feed, "load", moved_back("step", 2)),
    "tokens are counted anew": (Progress, "load", moved_back("tokens", 5)),
    "an evaluation is forgotten": (
        loop,
        "_evaluate_if_due",
        lambda evaluate: lambda run: run.progress.taken and evaluate(run),
    ),
}
"""What is replaced, and what by: faults that trainers really have."""


first, *others = DEFECTS


@pytest.mark.parametrize("defect", [first, *map(slow, others)])
def test_a_seeded_defect_is_caught(defect, tmp_path, monkeypatch):
    place, name, make = DEFECTS[defect]
    monkeypatch.setattr(place, name, make(getattr(place, name)))
    assert lab.run(lab.config(), tmp_path / "undisturbed").code == 0
    with pytest.raises(AssertionError):
        chain("AdamW, cosine", [3], tmp_path / "undisturbed", tmp_path / "run")


def test_draws_that_are_neither_keyed_nor_restored_are_caught(tmp_path, monkeypatch):
    # Either alone is enough: what is keyed to its micro-batch does not depend on the state.
    monkeypatch.setattr(GeneratorsPart, "load", without)
    monkeypatch.setattr(base, "seed_draws", without)
    name = "memory that runs out, steps that are not finite"
    assert lab.run(lab.config(*EVERY[name].split()), tmp_path / "undisturbed").code == 0
    with pytest.raises(AssertionError):
        chain(name, [3], tmp_path / "undisturbed", tmp_path / "run")


def test_the_comparison_sees_one_bit(tmp_path):
    assert lab.run(lab.config(), tmp_path).code == 0
    found = lab.outcome(tmp_path)
    dtype, shape, whole = found["model.head.bias"]
    flipped = found | {"model.head.bias": (dtype, shape, bytes([whole[0] ^ 1]) + whole[1:])}
    assert lab.difference(flipped, found) == ["model.head.bias"]
