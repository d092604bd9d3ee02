"""Harness 13: memory that runs out at any point, and the very same step.

A failure is injected at every (micro-batch, phase) of a step whose model draws from every global
generator, normalises over its micro-batch and replaces its buffers. What the run leaves behind is
that of a run which was cut so from the start, bit for bit: weights, moments, buffers, random
states, metrics, the ledger. With BatchNorm, and with a mean of means, the cut is a part of what is
computed, so the replay keeps it, and the run ends where that does not help.
"""

import json
import resource
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


def test_memory_that_runs_out_in_one_replay_after_another_is_cut_as_often(tmp_path):
    settings = lab.config(*SHORT, "accum.micro=8")
    assert lab.run(lab.config(*SHORT, "accum.micro=2"), tmp_path / "expected").code == 0
    folder = tmp_path / "struck"
    ended = lab.run(struck(settings, "0:1:1:end", "0:2:3:loss"), folder)
    assert (ended.code, replays(folder), len(notices(ended))) == (0, [2, 0, 0], 1)
    lab.assert_same(left_behind(folder), left_behind(tmp_path / "expected"), "two replays")


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("BatchNorm", "norm is BatchNorm, which normalises within each micro-batch"),
        nightly("a mean of means", "a mean of means depends on the micro-batch size"),
    ],
)
def test_a_cut_that_is_a_part_of_the_step_is_tried_twice_and_never_made_smaller(
    variant, why, tmp_path
):
    settings = lab.config(*RUN, *VARIANTS[variant], "checkpoint.every=1")
    ended = lab.run(struck(settings, "0:2:3:middle", "0:3:3:middle"), tmp_path)
    assert ended.code == 5
    assert ended.error.startswith(f"step 2: out of memory twice, and {why}")
    assert "lower accum.micro" in ended.error
    assert "\n" not in ended.error
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1]


def test_a_resumed_run_cuts_as_finely_as_the_one_that_ran_out_of_memory(tmp_path):
    settings = lab.config(*RUN, "accum.micro=4", "steps=6")
    faulty = struck(settings, "0:2:1:backward")
    assert lab.run(faulty, tmp_path / "straight").code == 0
    folder = tmp_path / "resumed"
    assert lab.run(faulty, folder, after_step=lab.stop_at(3)).code == 75
    assert lab.run(settings, folder, resume=True).code == 0
    entries = [e for e in lab.logged(folder)["metrics"] if "lr" in e]
    assert [e["micro_batches"] for e in entries] == [6, 12, 12, 12, 12, 12]
    assert replays(folder) == [0, 1, 0, 0, 0, 0]
    lab.assert_same(left_behind(folder), left_behind(tmp_path / "straight"), "resumed")


@pytest.mark.parametrize(
    "line", ["num_workers=1", *map(nightly, ("num_workers=0", "data.on_bad=skip"))]
)
def test_a_host_without_memory_for_a_sample_ends_with_5_and_names_it(line, tmp_path):
    settings = lab.config(f"data._target_={ALLOCATIONS}.Unreadable", "steps=3", line)
    ended = lab.run(settings, tmp_path)
    assert ended.code == 5, ended
    assert "sample 5 of Unreadable: the host's memory ran out: MemoryError: row 5" in ended.error
    assert "\n" not in ended.error


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_real_allocations_that_fail_are_replayed_in_pieces_that_fit(tmp_path):
    """The address space has room for six samples of 128 MiB; eight, the whole batch, fail."""
    line = (f"model._target_={ALLOCATIONS}.Sprawling", "model.dropout=0.3", "eval.every=null")
    settings = lab.config(*line, "accum.micro=8")

    def confined() -> int:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = taken + 7 * 2**27
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return lab.run(settings, tmp_path / "confined").code

    assert lab.fork(confined, tmp_path / "log").wait() == 0, (tmp_path / "log").read_text()
    assert replays(tmp_path / "confined")[:2] == [1, 0]
    assert lab.run(lab.config(*line, "accum.micro=4"), tmp_path / "expected").code == 0
    lab.assert_same(
        left_behind(tmp_path / "confined"), left_behind(tmp_path / "expected"), "real failures"
    )
