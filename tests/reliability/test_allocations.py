"""Harness 13: memory that runs out at any point, and the very same step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.nightly import counts, nightly, slow
from tests.reliability import lab
from tests.reliability.allocations import PHASES
from tests.reliability.support import cases, replay
from trainer.checkpoint.store import CheckpointStore
from trainer.config.run_config import RunConfig

ALLOCATIONS = "tests.reliability.allocations"

RUN = (
    *(f"model._target_={ALLOCATIONS}.Net", "model.dropout=0.3", "batch.global=23"),
    *(f"accum.gradient._target_={ALLOCATIONS}.Struck", "eval.every=null"),
)
SHORT = (*RUN, "steps=3", "checkpoint.every=null")

VARIANTS = {
    "BatchNorm": ("model.norm=true", "batchnorm=micro", "accum.micro=2"),
    "a mean of means": ("batch.normalizer=micro_batches", "accum.micro=2"),
    "cut smaller": ("accum.micro=2",),
}
"""Twelve micro-batches each; the last variant may be cut into 23."""

POINTS = [(number, phase) for number in range(12) for phase in PHASES]


def struck(settings: RunConfig, *points: str) -> RunConfig:
    """Let memory run out somewhere: `rank:attempt:micro-batch:phase`."""
    gradient = settings.accum.gradient.model_copy(update={"params": {"points": list(points)}})
    accum = settings.accum.model_copy(update={"gradient": gradient})
    return settings.model_copy(update={"accum": accum})


def left_behind(folder: Path) -> dict[str, Any]:
    """Read what a run left, without the number of its replays and how it is cut.

    Evaluation has a cut of its own, which follows that of training and sums in another order.
    """
    found = lab.outcome(folder)
    parts = json.loads(found["parts"])
    terms = parts["terms"]["state"]
    terms["contract"] = {k: v for k, v in terms["contract"].items() if not k.startswith("accum")}
    del parts["cut"], terms["config_hash"]
    metrics = [
        {k: v for k, v in e.items() if k != "replays"} for e in found["metrics"] if "lr" in e
    ]
    return {**found, "parts": parts, "metrics": metrics}


def replays(folder: Path) -> list[int]:
    return [entry.get("replays", 0) for entry in lab.logged(folder)["metrics"] if "lr" in entry]


def notices(ended: lab.Ended) -> list[str]:
    return [line for line in ended.screen.splitlines() if "out of memory" in line]


@counts(2, len(POINTS))
@pytest.mark.parametrize("variant", ["BatchNorm", slow("cut smaller"), nightly("a mean of means")])
def test_memory_that_runs_out_anywhere_in_a_step_changes_nothing(variant, count, tmp_path):
    settings = lab.config(*SHORT, *VARIANTS[variant])
    finer = settings if variant != "cut smaller" else lab.config(*SHORT, "accum.micro=1")
    assert lab.run(finer, tmp_path / "expected").code == 0
    expected = left_behind(tmp_path / "expected")
    assert sorted(expected["ledger"][0]["ids"]) == list(range(23))
    for case, chance in cases(count):
        number, phase = POINTS[case] if count == len(POINTS) else chance.choice(POINTS)
        folder = tmp_path / str(case)
        ended = lab.run(struck(settings, f"0:1:{number}:{phase}"), folder)
        about = f"{variant}, {phase} of micro-batch {number}: {replay(case)}"
        assert ended.code == 0, (about, ended)
        assert replays(folder) == [1, 0, 0], about
        assert len(notices(ended)) == 1, about
        lab.assert_same(left_behind(folder), expected, about)


@pytest.mark.slow
def test_memory_that_runs_out_in_one_replay_after_another_is_cut_as_often(tmp_path):
    settings = lab.config(*SHORT, "accum.micro=8")
    assert lab.run(lab.config(*SHORT, "accum.micro=2"), tmp_path / "expected").code == 0
    folder = tmp_path / "struck"
    ended = lab.run(struck(settings, "0:1:1:end", "0:2:3:loss"), folder)
    assert (ended.code, replays(folder), len(notices(ended))) == (0, [2, 0, 0], 1)
    lab.assert_same(left_behind(folder), left_behind(tmp_path / "expected"), "two replays")


def test_a_cut_that_is_a_part_of_the_step_is_tried_twice_and_never_made_smaller(tmp_path):
    settings = lab.config(*RUN, *VARIANTS["BatchNorm"], "checkpoint.every=1")
    ended = lab.run(struck(settings, "0:2:3:middle", "0:3:3:middle"), tmp_path)
    why = "norm is BatchNorm, which normalises within each micro-batch"
    assert ended.code == 5
    assert ended.error.startswith(f"step 2: out of memory twice, and {why}")
    assert "lower accum.micro" in ended.error
    assert "\n" not in ended.error
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1]


def test_a_host_without_memory_for_a_sample_ends_with_5_and_names_it(tmp_path):
    settings = lab.config(f"data._target_={ALLOCATIONS}.Unreadable", "steps=3", "num_workers=1")
    ended = lab.run(settings, tmp_path)
    assert ended.code == 5, ended
    assert "sample 5 of Unreadable: the host's memory ran out: MemoryError: row 5" in ended.error
    assert "\n" not in ended.error
