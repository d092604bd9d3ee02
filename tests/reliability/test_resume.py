"""Harness 9: stopped anywhere and resumed, a run ends as if it had not been stopped, bit for bit.

Every configuration runs once undisturbed, and then again, stopped by a signal at some steps and
resumed each time. Parameters, moments, buffers, random states, cursor, metrics and the ledger of
samples are equal; the tolerance is 0.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.reliability import lab
from tests.reliability.support import cases, replay

CONFIGURATIONS = {
    "AdamW, cosine": [],
    "SGD with momentum": ["optimizer=sgd", "optimizer.lr=0.05"],
    "AMSGrad": [
        "optimizer._target_=torch.optim.Adam",
        "optimizer.lr=0.01",
        "optimizer.amsgrad=true",
    ],
    "Adagrad": ["optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.01"],
    "RMSprop": ["optimizer._target_=torch.optim.RMSprop", "optimizer.momentum=0.9"],
    "NAdam": ["optimizer._target_=torch.optim.NAdam", "optimizer.lr=0.01"],
    "Adamax": ["optimizer._target_=torch.optim.Adamax", "optimizer.lr=0.01"],
    "averaged SGD": ["optimizer._target_=torch.optim.ASGD", "optimizer.lr=0.01"],
    "no clipping": ["clip_norm=null"],
    "always clipped": ["clip_norm=0.01"],
    "constant rate": ["scheduler=constant"],
    "warm-up and decay": ["scheduler=wsd", "scheduler.warmup=3"],
    "dropout": ["model.dropout=0.3"],
    "BatchNorm": ["model.norm=true", "batchnorm=micro"],
    "bfloat16 autocast": ["precision=bf16"],
    "one micro-batch": ["accum.micro=8"],
    "ragged accumulation": ["accum.micro=null", "accum.steps=5"],
    "planned under a budget": ["accum=budget", "accum.micro=null", "accum.max_tokens=20"],
    "batches of tokens": ["batch=tokens", "batch.global=35"],
    "no short batches": ["batch.tail=drop"],
    "epochs": ["steps=null", "epochs=3"],
    "augmented data": ["data._target_=tests.reliability.toys.DrawnRows"],
    "loading processes": ["num_workers=2"],
    "written behind": ["checkpoint.asynchronous=true"],
    "tied weights": ["model.tied=true"],
    "frozen weights": ["model.frozen=true"],
    "two loss terms": ["objective.z_loss=0.01", "objective.label_smoothing=0.1"],
    "mean over samples": ["batch.normalizer=samples"],
    "mean of means": ["batch.normalizer=micro_batches"],
    "steps that are not finite": ["data.faults=['3:loss:nan','11:gradient:inf']"],
    "memory that runs out": ["data.faults=['5:oom']", "model.dropout=0.3"],
    "samples without a label": ["data.faults=['5:unlabelled','6:unlabelled']"],
    "no cadence": ["checkpoint.every=null", "eval.every=null"],
    "everything at every step": ["checkpoint.every=1", "eval.every=1"],
}


def chain(name: str, stops: list[int], undisturbed: Path, folder: Path) -> None:
    """Run a configuration, stopped after some steps, and compare."""
    settings = lab.config(*CONFIGURATIONS[name])
    for number, stop in enumerate(stops):
        ended = lab.run(settings, folder, resume=number > 0, after_step=lab.stop_at(stop))
        assert ended.code == 75, ended
    ended = lab.run(settings, folder, resume=bool(stops))
    assert ended.code == 0, ended
    lab.assert_same(lab.outcome(folder), lab.outcome(undisturbed), f"stopped after {stops}")


def reference(name: str, folder: Path) -> int:
    """Run a configuration undisturbed, and count its steps."""
    ended = lab.run(lab.config(*CONFIGURATIONS[name]), folder)
    assert ended.code == 0, ended
    return int(lab.outcome(folder)["step"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_that_is_stopped_and_resumed_ends_as_the_undisturbed_one(
    name: str, tmp_path: Path
) -> None:
    steps = reference(name, tmp_path / "undisturbed")
    seed = next(cases(1))[1].random()
    stops = sorted(Random(f"{seed} {name}").sample(range(1, steps), 2))
    print(f"{name}: stopped after {stops} of {steps}")
    chain(name, stops, tmp_path / "undisturbed", tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_stop_point_of_every_configuration_is_exact(name: str, tmp_path: Path) -> None:
    steps = reference(name, tmp_path / "undisturbed")
    points = [[stop] for stop in range(1, steps)] + [list(range(1, steps))]
    for case, chance in cases(max(10 - len(points), 1)):
        points.append(sorted(chance.sample(range(1, steps), 3)))
        print(replay(case))
    for number, stops in enumerate(points):
        chain(name, stops, tmp_path / "undisturbed", tmp_path / f"run{number}")
    print(f"{name}: {len(points)} ways to stop")


def test_the_comparison_sees_one_bit(tmp_path: Path) -> None:
    reference("AdamW, cosine", tmp_path / "run")
    found = lab.outcome(tmp_path / "run")
    dtype, shape, whole = found["model.head.bias"]
    flipped = bytes([whole[0] ^ 1]) + whole[1:]
    assert lab.difference({**found, "model.head.bias": (dtype, shape, flipped)}, found) == [
        "model.head.bias"
    ]
