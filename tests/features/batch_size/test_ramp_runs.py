"""`batch=ramp` as it is typed: sizes, rates, stages that are shown, resuming, and mistakes."""

import math
import shlex
from pathlib import Path

import pytest

from tests.lib.cli_support import prepared
from tests.lib.run_support import TOYS, curve, entries, go, overrides, read_json, shell, state
from tests.reliability.rank_work import run_as_rank
from trainer.core.world import World

RAMP = "batch=ramp 'batch.stages={0: 4, 20: 8, 0.06k: 16}' epochs=2"
SIZES = [4, 4, 4, 4, 4, 8, 8, 6, 8, 8, 8, 16, 2]
"""Of 42 samples an epoch, whose last step is short."""
DOUBLE = f"model._target_={TOYS}.DoubleNet scheduler=constant accum.micro=3"


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


def test_the_plan_shows_every_stage_and_names_those_without_a_step(capsys):
    line = RAMP.replace("20: 8", "19: 5, 20: 8").replace("}", ", 2M: 8}")
    line = line.replace("epochs=2", "steps=13 scheduler.scale=linear scheduler.reference_batch=8")
    assert shell(f"plan {shlex.join(typed(line))}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    first = "from step 1 (sample 0): 4 samples, 5 steps, 2 accumulation steps, lr 0.006 (0.012 x "
    assert f"{first}4/8)" in shown
    assert "from step 6 (sample 20): 8 samples, 6 steps, 3 accumulation steps, lr 0.012" in shown
    assert "lr 0.024 (0.012 x 16/8)" in shown
    for begin in (19, 2000000):
        assert f"ends after 84 samples, and has no step of the stage at {begin}" in shown
    assert shown.count("has no step of the stage at") == 2
    (file,) = Path().glob("outputs/*/*/plan.json")
    plan = read_json(file)
    assert [each["steps"] for each in plan["stages"]] == [5, 6, 2]
    assert (plan["steps"], plan["epochs"], plan["steps_per_epoch"]) == (13, 2.0, 8)
    last = {"step": 12, "samples": 66, "epoch": 66 / 42, "size": 16, "steps": 2}
    last |= {"accum_steps": 6, "micro_batches": 6, "lr": 0.024, "followed_batch": {}}
    assert plan["stages"][2] == last
