"""`batch=ramp` as it is typed: sizes, rates, stages that are shown, resuming, and mistakes."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from tests.lib.cli_support import prepared
from tests.lib.run_support import TOYS, curve, entries, go, overrides, read_json, shell, state
from tests.reliability.rank_work import run_as_rank
from trainer import train
from trainer.core.errors import ConfigError
from trainer.core.world import World

RAMP = "batch=ramp 'batch.stages={0: 4, 20: 8, 0.06k: 16}' epochs=2"
SIZES = [4, 4, 4, 4, 4, 8, 8, 6, 8, 8, 8, 16, 2]
"""Of 42 samples an epoch, whose last step is short."""
DOUBLE = f"model._target_={TOYS}.DoubleNet scheduler=constant accum.micro=3"

pytestmark = pytest.mark.usefixtures("own_folder")


def typed(line: str) -> list[str]:
    """Settings over the usual ones, whose size and length of the run give way."""
    return [each for each in overrides(line) if each not in ("steps=6", "batch.global=8")]


def sizes_of(folder: Path) -> list[int]:
    return [len(entry["ids"]) for entry in entries(folder, "samples.jsonl")]


def test_a_ramp_that_goes_on_in_its_middle_on_two_ranks_is_the_uninterrupted_run(ranks):
    """Bit for bit in ids and rates, to 1e-12 in losses and weights; a control has no ramp."""
    rule = "scheduler.scale=sqrt scheduler.reference_batch=4 scheduler.keep_half_life=true"
    lines = shlex.join(typed(f"{RAMP} {DOUBLE} {rule}"))
    whole, part = Path("whole").absolute(), Path("part").absolute()
    assert run_as_rank(World(), prepared(lines).config, whole, {}) == {"code": 0}
    assert sizes_of(whole) == SIZES
    asked = [4] * 5 + [8] * 6 + [16] * 2
    expected = [0.012 * math.sqrt(size / 4) for size in asked]
    assert curve(whole, "lr") == pytest.approx(expected, rel=1e-12)
    assert curve(whole, "samples")[-1] == 84
    assert curve(whole, "epoch")[7] == 1.0

    assert run_as_rank(World(), prepared(lines).config, part, {"stop_after": 6})["code"] == 75
    two = prepared(f"{lines} parallel.ranks=2").config
    assert ranks.run(2, run_as_rank, two, part, {"resume": True}) == [{"code": 0}] * 2
    for name in ("lr", "samples", "tokens", "epoch"):
        assert curve(part, name) == curve(whole, name)
    assert entries(part, "samples.jsonl") == entries(whole, "samples.jsonl")
    assert curve(part, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-12)
    ends, found = state(whole), state(part)
    for name in (name for name in ends if name.startswith("model.")):
        scale = float(ends[name].abs().max())
        assert float((found[name] - ends[name]).abs().max()) <= 1e-12 * scale
    control = go(f"{DOUBLE} batch.global=8 {rule} epochs=2 steps=null")
    assert abs(curve(control, "loss")[5] / curve(whole, "loss")[5] - 1) > 1e-6


def test_the_plan_shows_every_stage_and_names_one_that_the_run_does_not_reach(capsys):
    line = RAMP.replace("}", ", 2M: 8}").replace("epochs=2", "steps=13")
    line += " scheduler.scale=linear scheduler.reference_batch=8"
    assert shell(f"plan {shlex.join(typed(line))}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    first = "from step 1 (sample 0): 4 samples, 5 steps, 2 accumulation steps, lr 0.006 (0.012 x "
    assert f"{first}4/8)" in shown
    assert "from step 6 (sample 20): 8 samples, 6 steps, 3 accumulation steps, lr 0.012" in shown
    assert "lr 0.024 (0.012 x 16/8)" in shown
    assert "ends after 84 samples, and has no step of the stage at 2000000" in shown
    (file,) = Path().glob("outputs/*/*/plan.json")
    plan = read_json(file)
    assert [each["steps"] for each in plan["stages"]] == [5, 6, 2]
    assert (plan["steps"], plan["epochs"], plan["steps_per_epoch"]) == (13, 2.0, 8)
    assert plan["stages"][2] == {
        **{"step": 12, "samples": 66, "epoch": 66 / 42, "size": 16, "steps": 2, "accum_steps": 6},
        **{"micro_batches": 6, "lr": 0.024, "followed_batch": {}},
    }


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("batch.stages={10:64}", "the first stage has to begin at 0: {0: 64, ...}"),
        ("batch.stages={0:64,20k:256,10k:8}", "10000 stands behind a later beginning"),
        ("batch.stages={0:64,9:64}", "the stage at 9 has the size of that before; leave it out"),
        ("batch.stages={0:64,20ktokens:256}", "={0: 64, 20ktokens: 256}: the beginning 20ktokens"),
        ("batch.stages={0:64,1m:256}", "1m must be a number, 0 or more, such as 500, 20k or 1M"),
        ("batch.stages={0:64,10:0}", "={0: 64, 10: 0}: the size 0 at 10 must be a whole number"),
        ("batch.stages={0:64,64:3.5}", "the size 3.5 at 64 must be a whole number of at least 1"),
        ("batch.stages=[0,64]", "must be sizes by what batch.at counts, e.g. {0: 64, 20k: 256}"),
        ("batch.stages={0:16,0:64}", "={0:16,0:64}: 0 stands in it twice; leave one out"),
        ("batch.stage={0:16}", "batch.stage: unknown setting. Did you mean batch.stages?"),
        ("", "batch.stages: batch=ramp needs it, e.g. batch.stages={0: 64, 20k: 256}"),
        (
            "batch.stages={0:64,0.5:128}",
            "no step begins at 0.5 samples; of epochs: batch.at=epochs",
        ),
        ("batch.stages={0:9,9:1} parallel.ranks=2", "a stage of 1 leaves some of 2 ranks without"),
        ("batch.stages={0:64} batch.global=9", "batch.global=9: batch.stages has the sizes; leave"),
        (
            "batch.stages={0:8} accum.micro=4 accum.steps=2",
            "steps grow with batch.stages, set this",
        ),
        (
            "batch.stages={0:8} accum.micro=null accum.steps=16",
            "a stage of 8 gives each of 1 rank 8 samples",
        ),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_in_a_line(line, fault):
    with pytest.raises(ConfigError) as refused:
        train(typed(f"batch=ramp {line}"))
    (text,) = refused.value.faults
    assert fault in text
    assert text.startswith(("batch.", "accum.steps="))


def test_a_stage_below_the_group_that_the_samples_are_normalised_in_is_refused():
    objective = "objective._target_=tests.lib.objective_toys.Pairs objective.group_size=4"
    line = f"batch=ramp batch.stages={{0:2,8:8}} accum.micro=4 {objective}"
    with pytest.raises(ConfigError, match="a stage of 2 samples is below the 4 samples of a group"):
        train(typed(line))


def test_a_mapping_without_its_quotes_is_answered_with_them(capsys):
    assert shell("batch=ramp batch.stages=0:64 batch.stages=20k:256") == 2
    assert "type 'batch.stages={...}' with its quotes" in capsys.readouterr().err


@pytest.mark.nightly
def test_betas_and_decay_follow_each_stage_as_they_do_a_batch_of_one_size():
    """A ramp of one stage is the constant batch bit for bit; the control keeps no half-lives."""
    rule = "scheduler.reference_batch=4 scheduler.keep_half_life=true scheduler.scale=sqrt"
    one = "batch=ramp batch.stages={0:8}"
    ramp = train(typed(f"{one} {DOUBLE} steps=3 {rule}"))
    constant = go(f"{DOUBLE} steps=3 {rule}")
    control = train(typed(f"{one} {DOUBLE} steps=3 {rule.replace('true', 'false')}"))
    ends = state(constant)
    assert all(tensor.equal(ends[name]) for name, tensor in state(ramp).items())
    assert not all(tensor.equal(ends[name]) for name, tensor in state(control).items())
    shown = train(typed(f"command=plan {RAMP} {DOUBLE} {rule}"))
    stages = read_json(shown.folder / "plan.json")["stages"]
    assert stages[0]["followed_batch"] == {}
    assert stages[2]["followed_batch"]["betas"][1] == pytest.approx([0.9**4, 0.95**4], rel=1e-12)
